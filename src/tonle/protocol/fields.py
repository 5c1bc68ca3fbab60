"""Request fields known by name that the server does not act on: without effect, removed, or refused.

Does: hold the tables of chats and completions, with a reason for the caller; say what becomes of a field. Does not: list the
fields that are acted on: those are the fields of the request types (`openai.py`, `embeddings.py`, `gateway/apis/`). A type
that differs from chats has a table of its own, in `other_fields`. A field in neither is unknown, and is reported as such.
docs/compatibility.md shows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tonle.errors import InvalidRequest

NO_EFFECT_MESSAGE = "accepted, has no effect"
UNKNOWN_MESSAGE = "unknown field, ignored"

# They do not change the answer.
NO_EFFECT = frozenset({
    "custom_labels", "custom_params", "guided_decoding_backend", "guided_whitespace_pattern", "metadata", "ngram_corpus_id",
    "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "rid",
    "routed_experts_prompt_start", "routed_experts_start_len", "safety_identifier", "service_tier", "session_id", "store",
    "stream_interval", "stream_reasoning", "user", "vllm_xargs",
})  # fmt: skip

_ROUTER = "removed: only a router inside the deployment may set it"
_PREFIXES = "removed: the server decides which requests share cached prefixes"

# A caller must not set these: they could expose other callers' cached prefixes, or point the engine at foreign memory.
STRIPPED = {
    "cache_salt": _PREFIXES,
    "extra_key": _PREFIXES,
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), _ROUTER),  # vLLM's
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank",
         "routed_dp_rank"), _ROUTER,
    ),  # SGLang's
}  # fmt: skip


class Refusal(NamedTuple):
    """Why a field is refused, and the values that ask for nothing and are therefore let through."""

    why: str
    neutral: tuple[Any, ...] = ()


class OtherFields(NamedTuple):
    """What becomes of fields that a type of request does not have, where it differs from the tables here."""

    refused: Mapping[str, Refusal] = {}
    no_effect: Mapping[str, str] = {}  # name -> what the caller is told
    silent: Mapping[
        str, str
    ] = {}  # name -> why it has no effect. Clients always send it: a warning would only be noise


_TEXT_ONLY = Refusal("this server reads and writes text only")
_BEAMS = Refusal("beam search is not supported; sample several answers with n, or best_of in /v1/completions")
_ADAPTER = Refusal("give the name of an adapter as model; GET /v1/models lists those there are")
_CHAT_ONLY = Refusal("only /v1/chat/completions has it", ([], "none", "auto", False))
_TOKEN_IDS = Refusal("return_token_ids adds the ids", (False,))
_PROCESSORS = Refusal("custom logits processors are not supported", ([],))
_LENGTH = Refusal("use max_tokens")

# They would change the answer, so they must not be ignored silently.
REFUSED: dict[str, Refusal] = {
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY._replace(neutral=(["text"],)),
    "images": _TEXT_ONLY._replace(neutral=([],)),
    **dict.fromkeys(
        ("images_config", "media_io_kwargs", "mm_payload", "mm_processor_kwargs"), _TEXT_ONLY._replace(neutral=({},))
    ),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), _TEXT_ONLY),
    "use_audio_in_video": _TEXT_ONLY._replace(neutral=(False,)),
    "web_search_options": Refusal("this server does not search the web"),
    "moderation": Refusal("this server does not moderate; do that before and after the request"),
    "documents": Refusal("put documents into messages or chat_template_kwargs", ([],)),
    "chat_template": Refusal("the model's own chat template is used; a caller cannot bring one"),
    "input_ids": Refusal("send token ids as prompt to /v1/completions"),
    "session_params": Refusal("this server keeps no sessions; send the whole conversation, its prefix is cached"),
    "task": Refusal("say it in the prompt"),
    "echo": Refusal("only /v1/completions can repeat the prompt", (False,)),
    "suffix": Refusal("filling in the middle is not supported", ("",)),
    "best_of": Refusal("ask for n answers and choose", (1,)),
    "use_beam_search": _BEAMS._replace(neutral=(False,)),
    "length_penalty": _BEAMS._replace(neutral=(1.0,)),
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "watermarking": Refusal("answers are not watermarked", (False,)),
    "repetition_detection": Refusal("use repetition_penalty or frequency_penalty"),
    "max_new_tokens": _LENGTH,
    "n_predict": _LENGTH,
    "logprob_token_ids": Refusal("ask for top_logprobs or logprobs"),
    "stop_regex": Refusal("use stop with plain strings"),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "detokenize": Refusal("answers are always text; return_token_ids adds the ids", (True,)),
    "spaces_between_special_tokens": Refusal("the tokenizer decides", (True,)),
    "verbosity": Refusal(
        "the server has no such control; say in the prompt how long the answer should be", ("medium",)
    ),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the end of a prompt", ("left",)),
    "return_tokens_as_token_ids": _TOKEN_IDS,
    "return_prompt_token_ids": _TOKEN_IDS,
    "return_prompt_text": Refusal("return_token_ids adds the ids of the prompt; /detokenize has its text", (False,)),
    "return_token_offsets": Refusal("/tokenize with return_token_strs has the tokens of a text", (False,)),
    "return_cached_tokens_details": Refusal("usage.prompt_tokens_details has cached_tokens", (False,)),
    "return_hidden_states": Refusal("/v1/embeddings has the last or the mean of them", (False,)),
    "return_routed_experts": Refusal("the server does not return them", (False,)),
    "return_meta_info": Refusal("usage and the headers of the reply have what there is", (False,)),
    "return_mm_kwargs": _TEXT_ONLY._replace(neutral=(False,)),
    "add_special_tokens": Refusal("the chat template writes special tokens itself", (False,)),
    "prompt_embeds": Refusal("a prompt is text or token ids"),
    "lora_path": _ADAPTER,
    "adapter": _ADAPTER,
}

# Of a chat, and refused at /v1/completions, where they would do nothing.
CHAT_ONLY: dict[str, Refusal] = dict.fromkeys(
    ("continue_final_message", "enable_thinking", "function_call", "functions", "reasoning", "reasoning_effort", "thinking",
     "thinking_token_budget", "tool_choice", "tools"), _CHAT_ONLY,
) | {
    "chat_template_kwargs": _CHAT_ONLY._replace(neutral=({},)),
    "include_reasoning": Refusal("thoughts are part of the text here", (True,)),
    "separate_reasoning": Refusal("thoughts are part of the text here", (False,)),
    "max_completion_tokens": _LENGTH,
    "top_logprobs": Refusal("logprobs is the number of alternatives here", (0,)),
}  # fmt: skip


def remark(name: str, value: Any, request_type: type, path: str = "") -> str | None:
    """What to tell the caller about a field that a request of this type does not have; None if there is nothing to say.

    `path`: where the field is, if inside of another: `messages[0].`. Raises `InvalidRequest` if the answer would not be what
    the field asks for.
    """
    own: OtherFields = getattr(request_type, "other_fields", OtherFields())
    if name in own.silent:
        return None
    if name in own.no_effect:
        return own.no_effect[name]
    refusal = own.refused.get(name)
    if refusal is None and not path:
        if name in NO_EFFECT:
            return NO_EFFECT_MESSAGE
        if name in STRIPPED:
            return STRIPPED[name]
        refusal = REFUSED.get(name)
    if refusal is None:
        return UNKNOWN_MESSAGE
    if _asks_for_nothing(value, refusal.neutral):
        return None
    raise InvalidRequest(f"{path}{name} cannot be served: {refusal.why}", param=path + name)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # bool is an int in Python: compare that too, or `best_of: true` would pass for 1
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)
