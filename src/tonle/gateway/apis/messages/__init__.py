"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, on top of chat completions and /tokenize."""
