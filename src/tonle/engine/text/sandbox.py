"""The sandbox a chat template runs in: Jinja as templates are written for, bounded.

A template comes with a model's files, so it is someone else's program. Jinja's sandbox keeps it from Python's
insides; this adds bounds on its work: loop turns and calls are counted, and whatever could build a huge value
(repetition, concatenation, padding, formatting) is checked.

Does: compile and run one template's source. Does not: know of messages.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tonle.engine.text.marks import Marks

MAX_CHARS = 16 * 1024**2  # of the output, and of any string or list a template builds
MAX_STEPS = 500_000  # of one rendering, about a second's work; a long chat takes some ten thousand
_CHARS_PER_STEP = 4096  # characters that are copied in the time of a loop turn
_CALL_STEPS = 4  # what a call costs; a loop turn costs one
_MAX_BITS = 4096  # of a whole number
_WIDE_FORMAT = re.compile(r"\d{7}|\*")  # a field of ten million characters, or one whose width is an argument


class TemplateRefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class TemplateBoundError(jinja2.TemplateError):
    """The template does more than any chat needs."""


def run_template(source: str, variables: Mapping[str, Any], marks: Marks | None = None) -> str:
    """What `source` makes of `variables`. Raises whatever Jinja and the template raise."""
    with _ENVIRONMENT.meter:
        return _join(compile_template(source, marks).generate(variables))


@lru_cache(maxsize=32)
def compile_template(source: str, marks: Marks | None = None) -> jinja2.Template:
    """With `marks` in place of the special tokens the template names. Raises `jinja2.TemplateSyntaxError`."""
    tree = _ENVIRONMENT.parse(source)
    if marks is not None:
        tree = _Marking(marks).visit(tree)
    return jinja2.Template.from_code(_ENVIRONMENT, _ENVIRONMENT.compile(tree), _ENVIRONMENT.make_globals(None))


def _join(parts: Iterator[str]) -> str:
    size, kept = 0, []
    for part in parts:
        size += len(part)
        if size > MAX_CHARS:
            raise TemplateBoundError(f"its output is longer than {MAX_CHARS} characters")
        kept.append(part)
    return "".join(kept)


class _Meter(threading.local):
    """Steps the rendering under way on this thread may still take."""

    left = 0

    def __enter__(self) -> None:
        self.left = MAX_STEPS

    def __exit__(self, *_: object) -> None:
        self.left = 0

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TemplateBoundError(f"it takes more than {MAX_STEPS} steps")

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item


def _sized(value: Any) -> Any:
    """A value that was just made. Making it costs steps by its length: a text that grows in a loop is copied each time."""
    if isinstance(value, str | list | tuple):
        if len(value) > MAX_CHARS:
            raise TemplateBoundError(f"it builds a value longer than {MAX_CHARS}")
        if len(value) > _CHARS_PER_STEP:
            _ENVIRONMENT.meter.spend(len(value) // _CHARS_PER_STEP)
    return value


class _Instrument(NodeTransformer):
    """Puts the meter on every loop and a size check on everything that makes strings longer."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (named by Jinja)
        self.generic_visit(node)
        node.iter = _filtered("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return _filtered("_sized", self.generic_visit(node))

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        return _filtered("_sized", self.generic_visit(node))


class _Marking(NodeTransformer):
    """Puts marks into a template's own text."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        node.data = self._marks.hide(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str):
            node.value = self._marks.hide(node.value)
        return node


def _filtered(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.meter = _Meter()
        self.filters.update(tojson=_to_json, format=_format, _counted=self.meter.count, _sized=_sized)
        for name in ("batch", "center", "indent", "slice"):
            self.filters[name] = _checked(self.filters[name])
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.spend(_CALL_STEPS)
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):  # ljust, zfill, format, ...
            _check_widths(args)
            if method.__name__ in ("format", "format_map"):
                _check_format(subject)
        return _sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return _sized(super().call_binop(context, operator, left, right))


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise TemplateBoundError(f"it computes a number of more than {_MAX_BITS} bits")
    elif operator == "*":
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > MAX_CHARS:
            raise TemplateBoundError(f"it builds a value longer than {MAX_CHARS}")


def _check_widths(values: Iterable[Any]) -> None:
    """Refuse numbers beyond any use as a width, before memory is taken for them."""
    if any(isinstance(value, int) and value > MAX_CHARS for value in values):
        raise TemplateBoundError(f"it asks for a width above {MAX_CHARS}")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateBoundError("it formats with a very wide field")


def _checked(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)  # keeps the mark of filters that want the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_widths([*args, *kwargs.values()])
        return _sized(filter_(*args, **kwargs))

    return checked


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(text)
    formatted: str = jinja2.filters.do_format(text, *args, **kwargs)
    return formatted


def _to_json(
    value: Any, *, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Plain JSON. Jinja's own filter escapes for HTML, which a model would read literally."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


_ENVIRONMENT = _Environment()
