"""The commands inside `tonle chat`, such as /help and /set.

Does: change the conversation and the options for its answers. Does not: read or print; a command returns its reply.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tonle.cli import screen
from tonle.cli.backends import AnswerOptions, Message
from tonle.cli.conversation import Conversation
from tonle.errors import InvalidRequest

Reply = str

EXIT = ("/exit", "/quit")
_DEFAULT = "default"  # the value that takes an option back

# name: how to read it, smallest, largest, what to say of anything else
_OPTIONS: dict[str, tuple[Callable[[str], float], float, float, str]] = {
    "temperature": (float, 0.0, 100.0, "a number from 0 to 100"),
    "top_p": (float, 1e-9, 1.0, "a number above 0 and up to 1"),
    "max_tokens": (int, 1, 2**31 - 1, "a whole number, 1 or more"),
    "seed": (int, -(2**63), 2**64 - 1, "a whole number"),
}


class Commands:
    """Owns the options of the next answers. Raises `InvalidRequest` for what cannot be done."""

    def __init__(self, model: str, conversation: Conversation, options: AnswerOptions) -> None:
        self.options = options
        self._model = model
        self._conversation = conversation
        self._saved: set[Path] = set()  # files of ours, which another /save may replace
        self._run: dict[str, tuple[str, str, Callable[[str], Reply]]] = {
            "/help": ("", "show this list", self._help),
            "/clear": ("", "start a new conversation; the system message stays (also /new)", self._clear),
            "/new": ("", "", self._clear),
            "/system": ("[TEXT]", "set the system message; without TEXT, show it", self._system),
            "/set": ("[NAME VALUE]", "set temperature, top_p, max_tokens or seed; alone, show them", self._set),
            "/save": ("FILE", "save the conversation as Markdown, or as JSON if FILE ends in .json", self._save),
        }

    @property
    def names(self) -> list[str]:
        return [*self._run, *EXIT]

    def has(self, name: str) -> bool:
        return name in self._run

    def run(self, line: str) -> Reply:
        name, _, rest = line.partition(" ")
        if name not in self._run:
            raise InvalidRequest(
                f"there is no command {name}; /help lists them. To send a message that starts with /, "
                "put a space before it"
            )
        return self._run[name][2](rest.strip())

    def _help(self, _: str) -> Reply:
        rows = {f"{name} {usage}".strip(): what for name, (usage, what, _) in self._run.items() if what}
        rows |= {
            "/exit": "leave (also /quit and Ctrl-D)",
            "Ctrl-C": "stop the answer",
            "Up, Down, Ctrl-R": "earlier messages, and search in them",
            "Alt-Enter": "start a new line; so does Enter after a \\",
            '"""': "several lines, up to the next three quotes; pasted text needs none",
        }
        width = max(map(len, rows))
        columns = max(40, shutil.get_terminal_size().columns - 1)
        indent = " " * (width + 4)
        return "\n".join(
            textwrap.fill(f"  {key:<{width}}  {what}", columns, subsequent_indent=indent) for key, what in rows.items()
        )

    def _clear(self, _: str) -> Reply:
        self._conversation.clear()
        return "new conversation"

    def _system(self, text: str) -> Reply:
        if text:
            self._conversation.system = text
        return f"system message: {self._conversation.system or 'none'}"

    def _set(self, rest: str) -> Reply:
        if rest:
            name, _, value = rest.partition(" ")
            self.options = changed(self.options, name, value.strip())
        values = dataclasses.asdict(self.options)
        return ", ".join(
            f"{name} {_DEFAULT if value is None else format(value, '.15g')}" for name, value in values.items()
        )

    def _save(self, rest: str) -> Reply:
        if not rest:
            raise InvalidRequest("give a file: /save FILE")
        path = Path(rest).expanduser().resolve()
        if path.exists() and path not in self._saved:
            raise InvalidRequest(f"{rest} exists already; choose another name")
        messages = self._conversation.messages
        text = _as_json(self._model, messages) if path.suffix == ".json" else _as_markdown(self._model, messages)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {rest}: {error.strerror or error}") from None
        self._saved.add(path)
        return f"saved {screen.count(len(messages), 'message')} to {rest}"


def changed(options: AnswerOptions, name: str, value: str) -> AnswerOptions:
    """`options` with one of them set from what the user typed. Raises `InvalidRequest`."""
    name = name.replace("-", "_")
    if name not in _OPTIONS:
        raise InvalidRequest(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
    read, least, most, expected = _OPTIONS[name]
    change: dict[str, Any] = {name: None}
    if value == _DEFAULT:
        return dataclasses.replace(options, **change)
    try:
        number = read(value)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise InvalidRequest(f"{name} must be {expected}, or {_DEFAULT}" + (f", not {value!r}" if value else ""))
    change[name] = number
    return dataclasses.replace(options, **change)


def _as_json(model: str, messages: list[Message]) -> str:
    return json.dumps({"model": model, "messages": messages}, indent=2, ensure_ascii=False) + "\n"


def _as_markdown(model: str, messages: list[Message]) -> str:
    parts = [f"# Chat with {model}", *(f"## {each['role'].capitalize()}\n\n{each['content']}" for each in messages)]
    return "\n\n".join(parts) + "\n"
