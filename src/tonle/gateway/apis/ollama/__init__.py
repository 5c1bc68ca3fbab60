"""Ollama's API: /api/chat, /api/generate, /api/embed and what lists models, on top of chat completions, completions and
embeddings. What downloads or changes models is refused."""
