"""Strategies for request bodies: from the wire types themselves, with hostile values in between, as JSON text.

A body is mostly right, so that it gets far; then something in it is odd: a wrong type, a deep list, a number without end, half
of a surrogate pair, a field named twice, a byte changed or cut off.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

# What `json.dumps` cannot write: these strings are replaced by the JSON text beside them.
_FRAGMENTS = {
    "\ue000deep": "[" * 300 + "]" * 300,
    "\ue000deeper": "[" * 2000 + "]" * 2000,
    "\ue000objects": '{"a":' * 150 + "1" + "}" * 150,
    "\ue000open": "[" * 3000,
    "\ue000digits": "9" * 5000,
    "\ue000huge": "1e999",
    "\ue000tiny": "-1e-999",
    "\ue000slow": "8.98846567431158e307",
    "\ue000lists": "[" + ",".join(["[5]"] * 3000) + "]",
    "\ue000empty": "[" + ",".join(['""'] * 3000) + "]",
    "\ue000ids": "[" + ",".join(["5"] * 5000) + "]",
    "\ue000twice": '{"a":1,"a":[2],"a":null}',
    "\ue000minus": "-0",
}
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from([
        "", "hi", "\x00", "\r\n", "\ud800", "\udc00x", "🇰🇭", "ភាសា", "a" * 3000, "[" * 2000, '{"a":' * 300, "{{ 7*7 }}",
        "{% for x in range(10**9) %}{% endfor %}", "<|im_end|>", "\\", '"', "1" * 400, "NaN", "__class__", "scripted", "m",
        "system", "user", "assistant", "tool", "text", "normal", "none", "../../etc/passwd", "%s%n", "\ufeff", "1e5", "-1",
    ]),
)  # fmt: skip
_INTEGERS = st.one_of(
    st.integers(0, 8),
    st.integers(-3, 40),
    st.sampled_from([0, 1, 255, 256, 257, 258, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400]),
)
_FLOATS = st.one_of(
    st.floats(0, 2), st.floats(), st.sampled_from([0.0, -0.0, 1.0, 0.7, 1e-320, 1e308, -1e308, 101.0]), _INTEGERS
)
_SCALARS = st.one_of(st.none(), st.booleans(), _INTEGERS, _FLOATS, _TEXTS, st.sampled_from(sorted(_FRAGMENTS)))
ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_ODD_NAMES = [
    "user", "tools", "tool_choice", "response_format", "use_cache", "cache_salt", "vllm_xargs", "kv_transfer_params", "x",
    "", "\x00", "\ud800", "functions", "metadata", "messages", "prompt", "input", "model", "stream", "n", "documents",
]  # fmt: skip


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, st.SearchStrategy[Any]]:
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    return {field.name: _mostly(_typed(field.type)) for field in found.fields}


def _mostly(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda number: right if number else ANYTHING)


def _typed(found: inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(found, inspect.Metadata):
        return _typed(found.type)
    if isinstance(found, inspect.UnionType):
        return st.one_of([_typed(each) for each in found.types])
    if isinstance(found, inspect.LiteralType):
        return st.sampled_from(list(found.values))
    if isinstance(found, inspect.ListType | inspect.VarTupleType):
        return st.lists(_typed(found.item_type), max_size=3)
    if isinstance(found, inspect.DictType):
        keys = st.integers(0, 300).map(str) | _TEXTS
        return st.dictionaries(keys, _typed(found.value_type), max_size=3)
    if isinstance(found, inspect.StructType):
        return st.deferred(lambda: _objects(found.cls))  # it may hold others of its kind
    simple: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
        inspect.IntType: _INTEGERS, inspect.FloatType: _FLOATS, inspect.StrType: _TEXTS,
        inspect.BoolType: st.booleans(), inspect.NoneType: st.none(),
    }  # fmt: skip
    return simple.get(type(found), ANYTHING)


@functools.cache
def _objects(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    names = {field.name: _typed(field.type) for field in found.fields}
    needed = {field.name: names.pop(field.name) for field in found.fields if field.required}
    return st.fixed_dictionaries(needed, optional=names)


@st.composite
def bodies(draw: st.DrawFn, struct: type[msgspec.Struct], valid: dict[str, Any]) -> bytes:
    """`valid`: the fields without which nothing is answered; most bodies have them."""
    known = fields_of(struct)
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    body = dict(valid) if draw(st.integers(0, 9)) else {}
    body |= {name: draw(known[name]) for name in names}
    if not draw(st.integers(0, 4)):
        body[draw(st.sampled_from(_ODD_NAMES) | _TEXTS)] = draw(ANYTHING)
    return draw(mangled(written(body, ascii_only=draw(st.booleans()))))


def written(value: Any, *, ascii_only: bool = True) -> bytes:
    text = json.dumps(value, ensure_ascii=ascii_only)
    for name, fragment in _FRAGMENTS.items():
        text = text.replace(json.dumps(name, ensure_ascii=ascii_only), fragment)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def mangled(draw: st.DrawFn, text: bytes) -> bytes:
    """One time in six, bytes are cut off, put in or repeated."""
    how = draw(st.integers(0, 17))
    if how > 2:
        return text
    place = draw(st.integers(0, len(text)))
    if how == 0:
        return text[:place]
    if how == 1:
        return text[:place] + draw(st.binary(min_size=1, max_size=4)) + text[place:]
    return text[:place] + text[max(0, place - 20) : place] + text[place:]
