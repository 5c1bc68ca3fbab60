"""Bounds on the patterns of a JSON schema that have to be looked at together, as the time for it grows exponentially.

Does: count the patterns that one string must match, through allOf and $ref, and the patterns of properties' names. Does not:
read them.
"""

from __future__ import annotations

from typing import Any

from tonle.engine.grammar.limits import MAX_PATTERN_PROPERTIES, MAX_PATTERNS_AT_ONCE, refuse


def check_patterns(schema: dict[str, Any], parts: list[tuple[str, dict[str, Any]]]) -> None:
    """`parts`: every schema in `schema`, and where it stands. Raises `InvalidRequest`."""
    num_names = sum(len(part["patternProperties"]) for _, part in parts if _is_dict(part.get("patternProperties")))
    if num_names > MAX_PATTERN_PROPERTIES:
        refuse(
            f"the JSON schema has {num_names} patternProperties; at most {MAX_PATTERN_PROPERTIES} are taken, all objects together"
        )
    counts: dict[int, int] = {}  # by the identity of a part
    for path, part in parts:
        if _at_once(part, schema, counts) > MAX_PATTERNS_AT_ONCE:
            refuse(
                f"the JSON schema has more than {MAX_PATTERNS_AT_ONCE} patterns or formats for one string at {path}, in allOf or "
                f"behind $ref; at most {MAX_PATTERNS_AT_ONCE} are taken: join them in one pattern"
            )


def _at_once(part: dict[str, Any], schema: dict[str, Any], counts: dict[int, int]) -> int:
    """How many patterns a string must match to fit `part`, at most. Goes through each part once; does not recurse."""
    waiting = [part]
    while waiting:
        top = waiting[-1]
        if counts.get(id(top), -1) >= 0:
            waiting.pop()
            continue
        joined, alternatives = _same_value(top, schema)
        if id(top) not in counts:
            counts[id(top)] = -1  # under way: one that leads back to itself counts as nothing
            if unknown := [other for other in (*joined, *alternatives) if id(other) not in counts]:
                waiting += unknown
                continue
        own = isinstance(top.get("pattern"), str) or isinstance(top.get("format"), str)
        counts[id(top)] = own + sum(max(counts[id(other)], 0) for other in joined)
        counts[id(top)] += max((counts[id(other)] for other in alternatives if counts[id(other)] > 0), default=0)
    return counts[id(part)]


def _same_value(part: dict[str, Any], schema: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Schemas that describe the same value as `part`: those that all hold, and those of which one does."""
    joined = list(part["allOf"]) if isinstance(part.get("allOf"), list) else []
    if isinstance(ref := part.get("$ref"), str):
        joined.append(_target(ref, schema))
    alternatives = [item for name in ("anyOf", "oneOf") if isinstance(part.get(name), list) for item in part[name]]
    return list(filter(_is_dict, joined)), list(filter(_is_dict, alternatives))


def _target(ref: str, schema: dict[str, Any]) -> Any:
    at: Any = schema
    for step in ref.removeprefix("#").split("/")[1:]:
        if isinstance(at, list):
            at = at[int(step)] if step.isdecimal() and len(step) < 7 and int(step) < len(at) else None
        else:
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if _is_dict(at) else None
    return at


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)
