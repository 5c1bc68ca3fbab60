"""Structural tags: free text in which some parts are bound, as vLLM, SGLang and xgrammar take them, to Lark.

Does: the older form (`structures` and `triggers`) and, of the newer one (`format`), const_string, json_schema, regex, any_text,
sequence, or, tag, triggered_tags and tags_with_separator. Does not: the other formats, which are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tonle.engine.grammar.json_schema import embedded_json
from tonle.engine.grammar.lark import lark_string, regex_literal
from tonle.engine.grammar.limits import check_bytes, check_value_depth, refuse

_TEXT = r"/(.|\n)*/"
_MAX_TAGS = 1_000


def tag_grammar(tag: Any, special_tokens: Mapping[str, int]) -> str:
    """Raises `InvalidRequest`. `special_tokens`: in a text of a tag these are tokens, not characters."""
    if not isinstance(tag, dict):
        refuse(f"structural_tag must be an object, not {type(tag).__name__}")
    check_value_depth("structural_tag", tag)
    lark = _Tags(special_tokens)
    if "format" in tag:
        lark.rules[0] += lark.format(tag["format"], "format", is_last=True)
    elif "structures" in tag:
        lark.rules[0] += lark.format(_triggered(tag), "structural_tag", is_last=True)
    else:
        refuse("structural_tag must have `format`, or `structures` and `triggers`")
    text = "\n".join(lark.rules) + "\n"
    check_bytes("the grammar of structural_tag", len(text.encode(errors="replace")))
    return text


def _triggered(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form as the newer one."""
    tags = []
    for index, structure in enumerate(_objects(tag, "structures", "the object")):
        where = f"structures[{index}]"
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append(
            {"begin": _text(structure, "begin", where), "content": content, "end": _text(structure, "end", where)}
        )
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Tags:
    """The rules of one structural tag. Each method gives what stands for its format in a rule."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules = ["start: "]
        self._special = special_tokens
        longest_first = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self._special_in = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._formats: dict[str, Callable[[dict[str, Any], str, bool], str]] = {
            "const_string": lambda given, where, _: self._literal(_text(given, "value", where)),
            "json_schema": lambda given, _where, _last: embedded_json(given.get("json_schema", True)),
            "regex": lambda given, where, _: regex_literal(_text(given, "pattern", where)),
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": lambda given, where, _: self._tag(given, where),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated,
        }

    def format(self, given: Any, where: str, is_last: bool) -> str:
        """`is_last`: nothing follows it in the whole answer."""
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            refuse(f"{where} must be an object with a `type`")
        handle = self._formats.get(given["type"])
        if handle is None:
            known = ", ".join(self._formats)
            refuse(
                f"{where} of structural_tag has type {given['type'][:60]!r}, which is not supported; known are {known}"
            )
        return handle(given, where, is_last)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"x{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _pieces(self, text: str) -> list[str]:
        """Alternately characters and a special token, beginning with characters."""
        return [text] if self._special_in is None else self._special_in.split(text)

    def _literal(self, text: str) -> str:
        pieces = self._pieces(text)
        shown = [lark_string(piece) if i % 2 == 0 else f"<[{self._special[piece]}]>" for i, piece in enumerate(pieces)]
        return " ".join(piece for piece in shown if piece != '""') or '""'

    def _text_until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        before, *rest = self._pieces(end)
        until = self._rule(f"{_TEXT} {lark_string(before)}", "[lazy]") if before else self._rule(_TEXT)
        return f"{until} {self._literal(end[len(before) :])}" if rest else until

    def _any_text(self, given: dict[str, Any], where: str, is_last: bool) -> str:
        if given.get("excludes"):
            refuse(f"{where} of structural_tag has `excludes`, which is not supported")
        if not is_last:
            refuse(
                f"{where} of structural_tag is any_text, which must come last, or be the content of a tag that has an end"
            )
        return self._rule(_TEXT)

    def _sequence(self, given: dict[str, Any], where: str, is_last: bool) -> str:
        elements = _list(given, "elements", where)
        return self._rule(
            " ".join(
                self.format(element, f"{where}.elements[{i}]", is_last and i == len(elements) - 1)
                for i, element in enumerate(elements)
            )
        )

    def _or(self, given: dict[str, Any], where: str, is_last: bool) -> str:
        elements = _list(given, "elements", where)
        return self._rule(
            " | ".join(self.format(element, f"{where}.elements[{i}]", is_last) for i, element in enumerate(elements))
        )

    def _tag(self, given: dict[str, Any], where: str, skip: int = 0) -> str:
        """`skip`: characters of its beginning that are written already."""
        begin, end = _text(given, "begin", where)[skip:], _end(given, where)
        content = given.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and not content.get("excludes") and end:
            return self._rule(f"{self._literal(begin)} {self._text_until(end)}")
        inner = self.format(content, f"{where}.content", False)
        return self._rule(f"{self._literal(begin)} {inner} {self._literal(end)}")

    def _triggered_tags(self, given: dict[str, Any], where: str, is_last: bool) -> str:
        if not is_last:
            refuse(f"{where} of structural_tag is triggered_tags, which must come last")
        if given.get("excludes"):
            refuse(f"{where} of structural_tag has `excludes`, which is not supported")
        triggers, tags = _list(given, "triggers", where), _objects(given, "tags", where)
        branches: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            at = f"{where}.tags[{i}]"
            begin = _text(tag, "begin", at)
            matching = [text for text in triggers if isinstance(text, str) and text and begin.startswith(text)]
            if not matching:
                refuse(
                    f"{at} of structural_tag begins with {begin[:60]!r}, and no trigger does: give one that it starts with"
                )
            branches.setdefault(matching[0], []).append(self._tag(tag, at, len(matching[0])))
        bound = [f"{self._text_until(trigger)} ({' | '.join(rules)})" for trigger, rules in branches.items()]
        one = self._rule(" | ".join(bound))
        if given.get("stop_after_first"):
            return one if given.get("at_least_one") else self._rule(f"{one} | {self._rule(_TEXT)}")
        return f"{one}{'+' if given.get('at_least_one') else '*'} {self._rule(_TEXT)}"

    def _separated(self, given: dict[str, Any], where: str, _is_last: bool) -> str:
        tags = _objects(given, "tags", where)
        one = self._rule(" | ".join(self._tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(tags)))
        separator = self._literal(_text(given, "separator", where))
        all_of_them = one if given.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._rule(all_of_them if given.get("at_least_one") else f"({all_of_them})?")


def _text(given: dict[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        refuse(f"{where} of structural_tag must have a string `{name}`")
    return value


def _end(given: dict[str, Any], where: str) -> str:
    """xgrammar takes a list of ends, too: any of them. One is enough for us."""
    end = given.get("end", "")
    if isinstance(end, list) and len(end) == 1:
        end = end[0]
    if not isinstance(end, str):
        refuse(f"{where} of structural_tag must have one string as its `end`")
    return end


def _list(given: dict[str, Any], name: str, where: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        refuse(f"{where} of structural_tag must have a list `{name}` that is not empty")
    if len(value) > _MAX_TAGS:
        refuse(f"{where} of structural_tag has {len(value)} {name}; at most {_MAX_TAGS} are taken")
    return value


def _objects(given: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    for index, value in enumerate(values := _list(given, name, where)):
        if not isinstance(value, dict):
            refuse(f"{where}.{name}[{index}] of structural_tag must be an object")
    return values
