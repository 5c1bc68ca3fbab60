"""How much of a closed record is kept.

Does: replace the body of a refused request by its summary, and cut answers without end. Does not: touch what was answered
and is of a usual size: that is on record whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from tonle.audit.body_summary import FIRST_BYTES, MAX_REFUSED_BYTES, summary_of
from tonle.audit.record import Record
from tonle.protocol.answers import Answer, Choice

MAX_ANSWER_CHARS = 32 * 1024**2  # of all texts of an answer; of longer ones, each text is cut
KEPT_CHARS = 1024**2  # of a text that is cut


def shorten_body(record: Record) -> None:
    """In place, when it is closed as refused."""
    body, limit = record.body, FIRST_BYTES if record.unauthenticated else MAX_REFUSED_BYTES
    if isinstance(body, bytes) and len(body) > limit:
        record.unread, record.body = summary_of(body, len(body)), None


def shorten_answer(record: Record) -> None:
    """In place, before it is written."""
    if isinstance(record.output, str) and len(record.output) > MAX_ANSWER_CHARS:
        record.output = _cut(record.output)
    answer = record.answer
    if answer is not None and answer.choices and _num_chars(answer) > MAX_ANSWER_CHARS:
        record.answer = dataclasses.replace(
            answer, choices={index: _cut_choice(choice) for index, choice in answer.choices.items()}
        )


def _num_chars(answer: Answer) -> int:
    return sum(sum(map(len, choice.all_pieces())) for choice in answer.choices.values())


def _cut_choice(choice: Choice) -> Choice:
    calls = {place: _cut_call(call) for place, call in choice.tool_calls.items()}
    reasoning = [_cut("".join(choice.reasoning))] if choice.reasoning else []
    return dataclasses.replace(choice, pieces=[_cut(choice.text)], reasoning=reasoning, tool_calls=calls)


def _cut_call(call: dict[str, Any]) -> dict[str, Any]:
    """Only its arguments can be that long: its id and its name stay."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {
        **call,
        "function": {part: _cut(text) if isinstance(text, str) else text for part, text in function.items()},
    }


def _cut(text: Any) -> Any:
    if len(text) <= KEPT_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return f"{text[:KEPT_CHARS]} [cut: {len(text)} characters in all, SHA-256 {digest}]"
