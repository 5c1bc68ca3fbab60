"""Request fields a Tonle replica knows by name and does not act on: without effect, removed, or refused.

Does: hold the tables, with a reason for the caller. Does not: list the fields it acts on (`openai.py`).
A field in neither is unknown, and is reported as such. docs/compatibility.md shows all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tonle.errors import InvalidRequest
from tonle.protocol.openai import CompletionRequest

# They do not change the answer.
NO_EFFECT = frozenset({
    "guided_decoding_backend", "guided_whitespace_pattern", "metadata", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store", "stream_reasoning", "user",
})  # fmt: skip

# The same of fields inside others. JSON is always written with one space after each comma and colon, and no other.
NO_EFFECT_INSIDE = frozenset({
    "structured_outputs.disable_any_whitespace", "structured_outputs.disable_fallback",
    "structured_outputs.whitespace_pattern",
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


_TEXT_ONLY = Refusal("this server reads and writes text only")
_BEAMS = Refusal("beam search is not supported")
_ADAPTER = Refusal("give the name of an adapter as model; GET /v1/models lists those there are")
_CHAT_ONLY = Refusal("only /v1/chat/completions has it", ([], "none", "auto", False))

# They would change the answer, so they must not be ignored silently.
REFUSED: dict[str, Refusal] = {
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY._replace(neutral=(["text"],)),
    "images": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY._replace(neutral=({},)),
    "web_search_options": Refusal("this server does not search the web"),
    "documents": Refusal("put documents into messages or chat_template_kwargs", ([],)),
    "chat_template": Refusal("the model's own chat template is used; a caller cannot bring one"),
    "echo": Refusal("only /v1/completions can repeat the prompt", (False,)),
    "suffix": Refusal("filling in the middle is not supported", ("",)),
    "best_of": Refusal("ask for n answers and choose", (1,)),
    "use_beam_search": _BEAMS._replace(neutral=(False,)),
    "length_penalty": _BEAMS._replace(neutral=(1.0,)),
    "logits_processors": Refusal("custom logits processors are not supported", ([],)),
    "logprob_token_ids": Refusal("ask for top_logprobs or logprobs"),
    "stop_regex": Refusal("use stop with plain strings"),
    "detokenize": Refusal("answers are always text; return_token_ids adds the ids", (True,)),
    "spaces_between_special_tokens": Refusal("the tokenizer decides", (True,)),
    "verbosity": Refusal(
        "the server has no such control; say in the prompt how long the answer should be", ("medium",)
    ),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the end of a prompt", ("left",)),
    "return_tokens_as_token_ids": Refusal("return_token_ids adds the ids", (False,)),
    "add_special_tokens": Refusal("the chat template writes special tokens itself", (False,)),
    "prompt_embeds": Refusal("a prompt is text or token ids"),
    "lora_path": _ADAPTER,
    "adapter": _ADAPTER,
}


# Of a chat, and refused at /v1/completions, where they would do nothing.
CHAT_ONLY: dict[str, Refusal] = dict.fromkeys(
    ("continue_final_message", "enable_thinking", "function_call", "functions", "reasoning", "reasoning_effort", "thinking",
     "thinking_token_budget", "tool_choice", "tools"), _CHAT_ONLY,
)  # fmt: skip


def remark(name: str, value: Any, request_type: type) -> str | None:
    """What to tell the caller about a top-level field that a request of this type does not have; None if the field asks for
    nothing.

    Raises `InvalidRequest` if the answer would not be what the field asks for.
    """
    if name in NO_EFFECT:
        return "accepted, has no effect"
    if name in STRIPPED:
        return STRIPPED[name]
    refusal = REFUSED.get(name)
    if refusal is None and request_type is CompletionRequest:
        refusal = CHAT_ONLY.get(name)
    if refusal is None:
        return "unknown field, ignored"
    if _asks_for_nothing(value, refusal.neutral):
        return None
    raise InvalidRequest(f"{name} cannot be served: {refusal.why}", param=name)


def remark_inside(path: str) -> str:
    """The same about a field inside another, such as `structured_outputs.disable_fallback`."""
    return "accepted, has no effect" if path in NO_EFFECT_INSIDE else "unknown field, ignored"


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # bool is an int in Python: compare that too, or `best_of: true` would pass for 1
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)
