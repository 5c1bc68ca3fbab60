"""The names of all request fields that OpenAI-compatible servers have, per endpoint.

Does: find fields that no server has, most often misspelled ones; the gateway warns about them. Does not: say which server
acts on which field (a Tonle replica does, see `parse.py` and `fields.py`).
The names are those of OpenAI's reference, of vLLM 0.32 and of SGLang; a newer name only costs a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS, EmbeddingRequest, RerankRequest, ScoreRequest
from tonle.protocol.fields import CHAT_ONLY, NO_EFFECT, REFUSED, STRIPPED, OtherFields
from tonle.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tonle.protocol.structured_fields import StructuredFields

_POOLING = (
    "add_special_tokens chat_template_kwargs mm_processor_kwargs model padding priority request_id rid "
    "truncate_prompt_tokens truncation_side use_activation user"
)
# Beside those of our own request types and of the tables in `fields.py`.
_OTHERS = {
    "/v1/chat/completions": "",
    "/v1/completions": "",
    "/v1/embeddings": (
        f"{_POOLING} add_generation_prompt chat_template continue_final_message dimensions embed_dtype "
        "encoding_format endianness input media_io_kwargs messages"
    ),
    "/v1/responses": (
        "background chat_template_kwargs context_management conversation enable_response_messages frequency_penalty "
        "ignore_eos include include_stop_str_in_output input instructions logit_bias max_output_tokens max_tool_calls "
        "min_p min_tokens model presence_penalty previous_input_messages previous_response_id priority prompt "
        "reasoning repetition_penalty seed skip_special_tokens speculate stop stop_token_ids stream stream_options temperature "
        "parallel_tool_calls text top_k top_logprobs top_p truncation"
    ),
    **dict.fromkeys(RERANK_PATHS, f"{_POOLING} chat_template"),
    **dict.fromkeys(SCORE_PATHS, f"{_POOLING} chat_template"),
    "/tokenize": "chat_template media_io_kwargs mm_processor_kwargs",
    "/detokenize": "",
}
_OURS: Mapping[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    **dict.fromkeys(RERANK_PATHS, RerankRequest),
    **dict.fromkeys(SCORE_PATHS, ScoreRequest),
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def _known(path: str) -> frozenset[str]:
    names = {*_OTHERS[path].split(), *STRIPPED}
    if path in _OURS:
        own = getattr(_OURS[path], "other_fields", OtherFields())
        names |= {*_OURS[path].__struct_fields__, *own.refused, *own.no_effect}
    if path in _GENERATE:
        names |= {*NO_EFFECT, *REFUSED, *CHAT_ONLY, *StructuredFields.__struct_fields__}
    return frozenset(names)


KNOWN: dict[str, frozenset[str]] = {path: _known(path) for path in _OTHERS}


def unknown_fields(path: str, body: Mapping[str, Any]) -> list[str]:
    """Fields of `body` that no server has at `path`; those that are null ask for nothing."""
    known = KNOWN.get(path)
    if known is None or known.issuperset(body):
        return []
    return [name for name, value in body.items() if name not in known and value is not None]
