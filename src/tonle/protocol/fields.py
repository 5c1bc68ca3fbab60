"""Request fields a Tonle replica knows by name and does not act on: without effect, removed, or refused.

Does: hold the three tables, with a reason for the caller. Does not: list the fields it acts on (`openai.py`).
A field in neither is unknown, and is reported as such.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tonle.errors import InvalidRequest

# They do not change the answer.
NO_EFFECT = frozenset({
    "include_reasoning", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

# A caller must not set these: they could expose other callers' cached prefixes, or point the engine at foreign memory.
STRIPPED = {
    "cache_salt": "removed: the server decides which requests share cached prefixes",
    "kv_transfer_params": "removed: only a router inside the deployment may set it",
    "ec_transfer_params": "removed: only a router inside the deployment may set it",
}


class Refusal(NamedTuple):
    """Why a field is refused, and the values that ask for nothing and are therefore let through."""

    why: str
    neutral: tuple[Any, ...] = ()


_STRUCTURED = Refusal("structured output is not supported in this version")
_TOOLS = Refusal("tool calling is not supported in this version; leave it out", ([], "none", "auto"))
_TEXT_ONLY = Refusal("this server reads and writes text only")
_BEAMS = Refusal("beam search is not supported")
_ADAPTER = Refusal("give the name of an adapter as model; GET /v1/models lists those there are")
_TOKENS = Refusal("restricting the vocabulary is not supported; use logit_bias", ([],))
_REASONING = Refusal("the server has no such control; use chat_template_kwargs if the chat template has", ("none",))

# They would change the answer, so they must not be ignored silently.
REFUSED: dict[str, Refusal] = {
    "response_format": Refusal(f'{_STRUCTURED.why}; only {{"type": "text"}} is', ({"type": "text"},)),
    "structured_outputs": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding_backend": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "grammar": _STRUCTURED,
    "regex": _STRUCTURED,
    "ebnf": _STRUCTURED,
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY._replace(neutral=(["text"],)),
    "images": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY._replace(neutral=({},)),
    "web_search_options": Refusal("this server does not search the web"),
    "documents": Refusal("put documents into messages or chat_template_kwargs", ([],)),
    "chat_template": Refusal("the model's own chat template is used; a caller cannot bring one"),
    "continue_final_message": Refusal("continuing the last message is not supported in this version", (False,)),
    "echo": Refusal("only /v1/completions can repeat the prompt", (False,)),
    "suffix": Refusal("filling in the middle is not supported", ("",)),
    "best_of": Refusal("ask for n answers and choose", (1,)),
    "use_beam_search": _BEAMS._replace(neutral=(False,)),
    "length_penalty": _BEAMS._replace(neutral=(1.0,)),
    "truncate_prompt_tokens": Refusal("a prompt is never cut silently; shorten it before sending"),
    "bad_words": _TOKENS,
    "allowed_token_ids": _TOKENS,
    "logits_processors": Refusal("custom logits processors are not supported", ([],)),
    "logprob_token_ids": Refusal("ask for top_logprobs or logprobs"),
    "stop_regex": Refusal("use stop with plain strings"),
    "detokenize": Refusal("answers are always text; return_token_ids adds the ids", (True,)),
    "spaces_between_special_tokens": Refusal("the tokenizer decides", (True,)),
    "reasoning_effort": _REASONING,
    "verbosity": _REASONING,
    "lora_path": _ADAPTER,
    "adapter": _ADAPTER,
}


def remark(name: str, value: Any, body: dict[str, Any]) -> str | None:
    """What to tell the caller about a top-level field we do not act on; None if it asks for nothing.

    Raises `InvalidRequest` if the answer would not be what the field asks for.
    """
    if name in NO_EFFECT:
        return "accepted, has no effect"
    if name in STRIPPED:
        return STRIPPED[name]
    if name not in REFUSED:
        return "unknown field, ignored"
    if _asks_for_nothing(value, REFUSED[name].neutral):
        return None
    if name == "tools" and body.get("tool_choice") == "none":
        return "accepted, has no effect with tool_choice none"
    raise InvalidRequest(f"{name} cannot be served: {REFUSED[name].why}", param=name)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # bool is an int in Python: compare that too, or `best_of: true` would pass for 1
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)
