"""GBNF (`root ::= …`), as llama.cpp, vLLM's xgrammar and SGLang's `ebnf` take it, to Lark.

Does: literals, character classes, groups, alternatives, repetitions, references. A rule that needs no other rule but such ones
becomes a terminal, which llguidance matches as one regular expression. Reads the text once. Does not: lookahead assertions and
the tag functions of xgrammar, which are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tonle.engine.grammar.limits import MAX_GBNF_BYTES, MAX_RULES, refuse

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<rule>[A-Za-z_][\w.-]*\s*::=)
      | (?P<call>(?:TagDispatch|TokenTagDispatch)\()
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<literal>"(?:[^"\\\n]|\\.)*")
      | (?P<set>\[\^?(?:[^\]\\\n]|\\.)*\])
      | (?P<repeat>[*+?]|\{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?\})
      | (?P<lookahead>\(\s*=)
      | (?P<open>\()
      | (?P<close>\))
      | (?P<bar>\|)
      | (?P<dot>\.)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_NOTHING = '""'
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Rule:
    line: int
    body: list[str] = field(
        default_factory=list
    )  # Lark, with "\0NAME" for a reference, "\1*" for how often what is before it comes
    names: set[str] = field(default_factory=set)  # that it refers to


def is_gbnf(grammar: str) -> bool:
    """Lark has no `::=`, but for what stands in a string or a comment."""
    return re.search(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=", grammar, re.MULTILINE) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Raises `InvalidRequest`."""
    if (num_bytes := len(grammar.encode(errors="replace"))) > MAX_GBNF_BYTES:
        refuse(f"the grammar has {num_bytes} bytes; at most {MAX_GBNF_BYTES} of GBNF are taken")
    rules = _parse(grammar)
    if "root" not in rules:
        refuse("the grammar has no rule `root`, where it would begin")
    if len(rules) > MAX_RULES:
        refuse(f"the grammar has {len(rules)} rules; at most {MAX_RULES} are taken")
    for name, rule in rules.items():
        if unknown := sorted(rule.names - rules.keys()):
            refuse(
                f"the grammar refers to {unknown[0]!r} in its rule {name!r} (line {rule.line}), which it does not define"
            )
    terminals = _terminals(rules)
    # Names of our own: Lark tells terminals from rules by their case.
    names = {name: f"T{i}" if name in terminals else f"r{i}" for i, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        body = " ".join(names[part[1:]] if part.startswith("\0") else part for part in rule.body)
        lines.append(f"{names[name]}: {_joined(body)}")
    return "\n".join(lines) + "\n"


def _joined(body: str) -> str:
    return body.replace(" \1", "") or _NOTHING


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that refer to none, or to such alone: never to themselves, however far around."""
    left = {name: len(rule.names) for name, rule in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for other in rule.names:
            used_by[other].append(name)
    ready = [name for name, count in left.items() if count == 0]
    found = set(ready)
    while ready:
        for name in used_by[ready.pop()]:
            left[name] -= 1
            if left[name] == 0:
                found.add(name)
                ready.append(name)
    return found


def _parse(grammar: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    depth, before = 0, "begin"  # `before`: the kind of the token before this one
    for kind, text, line in _tokens(grammar):
        if kind == "rule":
            _check_ended(depth, line)
            name = text[:-3].strip()
            if name in rules:
                refuse(f"the grammar defines {name!r} twice (line {line})")
            rule = rules[name] = _Rule(line)
        elif rule is None:
            refuse(f"the grammar must begin with a rule, `root ::= …`; line {line} has {text!r} before the first one")
        else:
            depth += (kind == "open") - (kind == "close")
            if depth < 0:
                refuse(f"the grammar closes a bracket that was not opened (line {line})")
            _add(rule, kind, text, line, before)
        before = kind
    _check_ended(depth, grammar.count("\n") + 1)
    return rules


def _check_ended(depth: int, line: int) -> None:
    if depth:
        refuse(f"the grammar has a bracket that is not closed before line {line}")


def _tokens(grammar: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            refuse(f"the grammar cannot be read at line {line}: {grammar[at : at + 30]!r}")
        kind, text = found.lastgroup or "", found[0]
        if kind in ("lookahead", "call"):
            what = "a lookahead assertion, (= …)" if kind == "lookahead" else f"{text}…)"
            refuse(f"the grammar has {what} at line {line}, which is not supported")
        if kind != "space":
            yield _Token(kind, text, line)
        line += text.count("\n")
        at = found.end()


def _add(rule: _Rule, kind: str, text: str, line: int, before: str) -> None:
    body = rule.body
    nothing_before = before in ("rule", "open", "bar")
    match kind:
        case "name":
            rule.names.add(text)
            body.append(f"\0{text}")
        case "literal":
            body.append(_literal(text[1:-1], line))
        case "set":
            body.append(_set(text, line))
        case "dot":
            body.append("/(?s:.)/")
        case "repeat" if nothing_before:
            refuse(f"the grammar repeats nothing at line {line}: {text!r}")
        case "repeat":
            body.append("\1" + re.sub(r"\s", "", text))
        case "close" | "bar" if nothing_before:
            body += [_NOTHING, ")" if kind == "close" else "|"]
        case _:
            body.append({"open": "(", "close": ")", "bar": "|"}[kind])


def _characters(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """Each character that the text stands for, and whether it was escaped."""
    at = 0
    while at < len(text):
        if text[at] != "\\":
            yield text[at], False
            at += 1
            continue
        found = _ESCAPE.match(text, at)
        assert found is not None  # `_TOKEN` lets no backslash stand alone
        code = found[1]
        if len(code) > 1:
            number = int(code[1:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                refuse(f"the grammar has an escape that is no character at line {line}: {found[0]!r}")
            yield chr(number), True
        elif code in "xuU":
            refuse(f"the grammar has an escape with too few digits at line {line}")
        else:
            yield _LETTERS.get(code, code), True
        at = found.end()


def _literal(text: str, line: int) -> str:
    return '"' + "".join(_in_string(character) for character, _ in _characters(text, line)) + '"'


def _in_string(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return f"\\u{ord(character):04x}" if ord(character) < 0x20 else character


def _set(text: str, line: int) -> str:
    """`[a-z]` as a regular expression. A dash is a range where it was written as one, and between two characters."""
    negated = text.startswith("[^")
    characters = list(_characters(text[2 if negated else 1 : -1], line))
    if not characters:
        refuse(f"the grammar has an empty set of characters at line {line}")
    inner = "".join(
        "-" if character == "-" and not escaped and 0 < i < len(characters) - 1 else _in_set(character)
        for i, (character, escaped) in enumerate(characters)
    )
    return f"/[{'^' if negated else ''}{inner}]/"


def _in_set(character: str) -> str:
    if character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"
