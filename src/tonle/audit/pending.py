"""Facts of any kind into a record that can be put into the chain.

Does: format one record so that it can always be written; what cannot be is left out, and the record says so. Does not:
give it its place (`chain.py`).
"""

from __future__ import annotations

import logging
from typing import Any

from tonle.audit import day_ledger
from tonle.audit.chain import PendingRecord
from tonle.audit.document import document, file_name
from tonle.audit.facts import Facts
from tonle.audit.media_store import hashes_in
from tonle.audit.plain_values import is_surely_plain, kind_of
from tonle.audit.redaction import Redactor
from tonle.audit.seal import Plain, encode_fields

log = logging.getLogger("tonle.audit")


def pending_record(
    facts: Facts, redactor: Redactor, omit: tuple[str, ...] = (), *, is_decoded: bool = False
) -> PendingRecord:
    """As it is; else with odd values converted; else without its content.

    `is_decoded`: the facts came in a message, so no value is in itself or in many places.
    """
    try:
        if is_decoded or kind_of(_values_from_outside(facts)) == "plain":  # an encoder comes to an end
            fields = encode_fields(document(facts, redactor, omit, make_plain=False))
            if redactor or is_surely_plain(fields.text):
                return _pending(facts, fields)
        return _format(facts, redactor, omit)
    except Exception:  # facts of an unexpected type: a program, or a backend, may say anything
        log.debug("the audit record %s has values of an unexpected type", facts.id, exc_info=True)
    try:
        return _format(facts.made_plain(), redactor, omit)
    except Exception:
        log.exception("the audit record %s is kept without its content", facts.id)
    return _format(facts.without_content(), redactor, omit)


def _values_from_outside(facts: Facts) -> list[Any]:
    """Those that a program or a backend may have made of anything. A body of bytes can hold only what JSON can."""
    values = [
        facts.output, facts.usage, facts.error, facts.cache, facts.route, facts.experiment, facts.warnings,
        facts.model_config, facts.timings_ms,
    ]  # fmt: skip
    if facts.answer is not None:
        values += (facts.answer.raw, facts.answer.error, facts.answer.usage)
    if not isinstance(facts.body, bytes):
        values.append(facts.body)
    return values


def _format(facts: Facts, redactor: Redactor, omit: tuple[str, ...]) -> PendingRecord:
    fields = encode_fields(document(facts, redactor, omit))
    return _pending(facts, fields)


def _pending(facts: Facts, fields: Plain) -> PendingRecord:
    day = day_ledger.text_of(facts.closed_ns)[:10]
    return PendingRecord(day, file_name(facts), fields, media=hashes_in(facts.media))
