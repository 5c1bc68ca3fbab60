"""HTML built from Python: what is text is escaped, what is HTML already is not.

Does: elements, tables, and JSON that may stand inside a script element. Does not: know benchmarks.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

VOID = {"br", "hr", "input", "meta", "line", "rect", "circle", "path", "polygon", "polyline", "col"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | None | Iterable["Content"]


def element(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes: `class_` is class, `data_x` is data-x; None and False leave one out, True has no value."""
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        text = f"{value:g}" if isinstance(value, float) else str(value)
        head += f" {key}" if value is True else f' {key}="{html.escape(text)}"'
    if name in VOID:
        return Html(f"<{head}>" if name in ("br", "hr", "input", "meta", "col") else f"<{head}/>")
    return Html(f"<{head}>{joined(content)}</{name}>")


def joined(content: Content) -> Html:
    """Parts one after the other; texts escaped."""
    if content is None:
        return Html("")
    if isinstance(content, str):
        return content if isinstance(content, Html) else Html(html.escape(content))
    return Html("".join(joined(part) for part in content))


def table(
    heads: Sequence[Content], rows: Sequence[Sequence[Content]], *, class_: str | None = None, caption: str = ""
) -> Html:
    """A table whose first column has the names of its rows. It scrolls by itself where it is too wide."""
    head = element("tr", *(element("th", cell, scope="col") for cell in heads))
    return wide_table([head], rows, class_=class_, caption=caption)


def wide_table(
    head_rows: Sequence[Html], rows: Sequence[Sequence[Content]], *, class_: str | None = None, caption: str = ""
) -> Html:
    """The same with heads of the caller's own, such as some that span columns."""
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inner = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", *head_rows),
        element("tbody", *body),
        class_=class_,
    )
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def script_json(value: Any) -> Html:
    """JSON that cannot end the script element it stands in, whatever its texts are."""
    text = msgspec.json.encode(value).decode()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Html(text)
