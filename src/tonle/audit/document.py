"""The facts of a closed record as the document that is written: parsed, named, masked. Runs where records are written.

Does: find the system prompt and the user's input in a request, texts and usage in an answer; put every field into a form
that every reader can open (`plain_values.py`). Does not: number, hash or write it, or bear facts of the wrong type
(`pending.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from tonle.audit.body_summary import UNSAFE_CHARS, BodySummary, is_text, shown, summary_of
from tonle.audit.day_ledger import text_of
from tonle.audit.facts import Facts
from tonle.audit.media_store import hashes_in
from tonle.audit.plain_values import kind_of, plain, plain_fields
from tonle.audit.redaction import MASKED, Redactor
from tonle.audit.seal import REMOVED, SEALED
from tonle.protocol.adapters import is_digest
from tonle.protocol.answers import Answer

SCHEMA = "tonle.audit/1"

# Of a request body: content has fields of its own, these are what `sampling` means, the rest are `parameters`.
_CONTENT = ("messages", "prompt", "input", "system", "instructions")
SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "min_tokens", "n", "best_of", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "logit_bias", "logprobs", "top_logprobs", "ignore_eos", "echo", "use_beam_search",
    "truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output",
))  # fmt: skip
_UNSAFE = re.compile(r"[^A-Za-z0-9.\-]+")
_DRAWN_ID = re.compile(r"[0-9a-f]{8}|[0-9a-f]{32}")  # the ids of records; older trails have the shorter ones
_NO_MARKS = str.maketrans("", "", "-:.")
_PARTS = ("queue", "prefill", "decode", "ttft", "total")


def document(
    record: Facts, redactor: Redactor, omit: tuple[str, ...] = (), *, make_plain: bool = True
) -> dict[str, Any]:
    """Every field of the schema, in the order people read them.

    `make_plain` False leaves that to a caller who finds out in a quicker way whether it is necessary.
    """
    request = _request(record.body)
    body = _raw_body(record, redactor) if not request else None
    answer = record.answer or Answer()
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "id": record.id,
        "request_id": record.request_id,
        "response_id": record.response_id or answer.response_id,
        "chain_id": _drawn_id(record.chain_id) or record.id,
        "previous_id": _drawn_id(record.previous_id),
        "date": text_of(record.opened_ns)[:10],
        "time": text_of(record.opened_ns),
        "finished": text_of(record.closed_ns),
        "endpoint": record.endpoint,
        "client": record.client,
        "key_id": record.key_id,
        "status": record.status,
        "http_status": record.http_status,
        "error": record.error if record.error is not None else answer.error,
        "model": record.model or _text(request.get("model")) or answer.model,
        "model_config": record.model_config,
        "adapter": record.adapter,
        "adapter_digest": _digest(record.adapter_digest),
        "stream": request.get("stream") is True,
        "system_prompt": _system_prompt(request),
        "user_input": _user_input(request),
        "messages": request.get("messages"),
        "prompt": request.get("prompt", request.get("input")),
        **_output(record, answer),
        "usage": _usage(record.usage or answer.usage),
        "latency_ms": _latency(record, answer, stream=request.get("stream") is True),
        "sampling": {name: value for name, value in request.items() if name in SAMPLING},
        "parameters": _parameters(request) if body is None else {"body": body},
        "cache": record.cache,
        "route": record.route,
        "experiment": record.experiment,
        "warnings": record.warnings,
    }
    if hashes := hashes_in(record.media):
        fields["media"] = list(hashes)
    if (make_plain or redactor) and kind_of(fields) != "plain":
        fields = {name: _plain_field(value) for name, value in fields.items()}
    return _masked(fields, redactor, omit)


def file_name(record: Facts) -> str:
    """`chat_completions_<shortid>_<timestamp>.json`; the time is that of the end, as is the folder's day."""
    path = record.endpoint.strip("/").removeprefix("v1/")
    stamp = text_of(record.closed_ns).translate(_NO_MARKS)
    return f"{_UNSAFE.sub('_', path)[:60].strip('.') or 'request'}_{record.id}_{stamp}.json"


def _request(body: Any) -> Mapping[str, Any]:
    """The body as an object; an empty one if it is none."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
    return body if isinstance(body, Mapping) else {}


def _raw_body(record: Facts, redactor: Redactor) -> Any:
    """What was sent is on record even if it made no sense, or was not read. None: there was nothing."""
    body, unread = record.body, record.unread
    if unread is not None:
        return _shown(unread, redactor)
    if not body or not isinstance(body, bytes):
        return body or None
    if redactor and not is_text(body):
        return _shown(summary_of(body), redactor)
    return body.decode(errors="replace")


def _shown(summary: BodySummary, redactor: Redactor) -> dict[str, Any]:
    fields = shown(summary)
    if redactor:
        if not is_text(summary.first, is_cut=summary.is_cut):
            fields["first"] = None  # what cannot be searched cannot be masked: its length and hash are all there is
        elif summary.is_cut:
            fields["first"] = redactor.mask(fields["first"], Counter())[:-UNSAFE_CHARS]
    return fields


def _parameters(request: Mapping[str, Any]) -> dict[str, Any] | None:
    named = (*_CONTENT, "model")
    rest = {name: value for name, value in request.items() if name not in SAMPLING and name not in named}
    rest |= {name: request[name] for name in ("system", "instructions") if name in request}
    return rest or None


def _plain_field(value: Any) -> Any:
    made = plain(value)
    if made is value or type(value) is not dict:
        return made
    fields = plain_fields(value)  # of many parameters, only one may be odd
    return fields if kind_of(fields) == "plain" else made


def _digest(value: Any) -> str | None:
    """Nothing else stands in this field: it is not searched for what must be masked."""
    return value if isinstance(value, str) and is_digest(value) else None


def _drawn_id(value: Any) -> str | None:
    """Of a record, or made by a server. Nothing else stands in these fields, so they are not masked."""
    return value if isinstance(value, str) and _DRAWN_ID.fullmatch(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _plain(content: Any) -> str:
    """Text of a message: a string, or a list of parts of which some are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = []
    for part in content:
        if isinstance(part, dict):
            text = part.get("text")
            parts.append(text if isinstance(text, str) else f"[{part.get('type')}]")
        elif isinstance(part, str):
            parts.append(part)
    return "\n".join(parts)


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = request.get("messages", request.get("input"))
    return [entry for entry in messages if isinstance(entry, dict)] if isinstance(messages, list) else []


def _system_prompt(request: Mapping[str, Any]) -> str | None:
    said = [
        _plain(entry.get("content")) for entry in _messages(request) if entry.get("role") in ("system", "developer")
    ]
    said += [_plain(request[name]) for name in ("system", "instructions") if request.get(name)]
    return "\n\n".join(said) or None


def _user_input(request: Mapping[str, Any]) -> Any:
    """The last thing the user said."""
    for entry in reversed(_messages(request)):
        if entry.get("role") == "user":
            return _plain(entry.get("content"))
    prompt = request.get("prompt", request.get("input", request.get("user_input")))
    return prompt if isinstance(prompt, str) or (isinstance(prompt, list) and prompt) else None


def _output(record: Facts, answer: Answer) -> dict[str, Any]:
    """`output` is the text; `choices` everything there is, when one text does not say it all."""
    output, choices = record.output, None
    if output is None:
        output = answer.text if answer.choices else answer.raw
    if len(answer.choices) > 1 or any(choice.tool_calls or choice.reasoning for choice in answer.choices.values()):
        choices = [
            {
                "index": index,
                "text": choice.text,
                "reasoning": "".join(choice.reasoning) or None,
                "tool_calls": list(choice.tool_calls.values()) or None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(answer.choices.items())
        ]
    return {"output": output, "choices": choices, "finish_reason": record.finish_reason or answer.finish_reason}


def _usage(usage: Any) -> Any:
    if not isinstance(usage, Mapping):
        return usage  # None, or what no server should say
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    total = usage.get("total_tokens")
    if total is None and isinstance(prompt, int) and isinstance(completion, int):
        total = prompt + completion
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else usage.get("cached_tokens")
    found = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, "cached_tokens": cached}
    # Of the engine in this process, where steps checked guesses: how many, and how many were right. Of media, how much.
    others = ("draft_tokens", "accepted_tokens", "audio_seconds", "characters", "images")
    return found | {name: usage[name] for name in others if name in usage}


def _latency(record: Facts, answer: Answer, *, stream: bool) -> dict[str, float | None]:
    known: dict[str, float | None] = dict.fromkeys(_PARTS)
    known["total"] = _ms(record.closed_s - record.opened_s)
    if stream and answer.first_s is not None and answer.last_s is not None:
        known["ttft"] = _ms(answer.first_s - record.opened_s)
        known["decode"] = _ms(answer.last_s - answer.first_s)
    if not isinstance(record.timings_ms, Mapping):
        return known
    return known | {name: _rounded(value) for name, value in record.timings_ms.items()}


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _masked(fields: dict[str, Any], redactor: Redactor, omit: tuple[str, ...]) -> dict[str, Any]:
    """The masked value is what is sealed: what was masked here was never on record."""
    counts: Counter[str] = Counter()
    if redactor:
        for name in MASKED:
            fields[name] = redactor.mask(fields[name], counts, field=name)
    for name in omit:
        if name in SEALED and fields[name] is not None:
            fields[name] = REMOVED
            counts[f"omitted {name}"] += 1
    fields["masked"] = dict(counts) or None
    return fields
