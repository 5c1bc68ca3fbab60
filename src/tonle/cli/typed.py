"""What the user of `tonle chat` types: whole messages, from a terminal with line editing or from a pipe.

A message may have several lines: a line that ends with a backslash goes on in the next one, and three double quotes
hold everything up to the next three. A terminal also takes pasted text as it is, and Alt-Enter.

Does: read messages and keep their history. Does not: know what a message means. prompt_toolkit is imported for a
terminal only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
HISTORY_NAME = "chat_history"


def is_open(text: str) -> bool:
    """More lines belong to it."""
    start = text.lstrip()
    if start.startswith(QUOTES):
        return QUOTES not in start[len(QUOTES) :]
    return text.endswith("\\")


def message_of(text: str) -> str:
    """Without the quotes around it and the blank space around those."""
    text = text.strip()
    if not text.startswith(QUOTES):
        return text
    inside, _, after = text[len(QUOTES) :].partition(QUOTES)
    return f"{inside}{after}".strip()


def from_pipe(lines: Iterator[str]) -> Iterator[str]:
    """One text for each line, or for several that belong together."""
    text = ""
    for line in lines:
        text += line.removesuffix("\n")
        if is_open(text):
            text = _next_line(text)
        else:
            yield text
            text = ""
    if text:
        yield text


def from_terminal(
    *, colour: bool, history_file: Path | None, commands: list[str], on_interrupt: Callable[[], None]
) -> Iterator[str]:
    """Until Ctrl-D. `on_interrupt` is called after a Ctrl-C on an empty line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.layout.processors import TabsProcessor
    from prompt_toolkit.output import ColorDepth, create_output

    session: PromptSession[str] = PromptSession(
        FormattedText([("bold ansicyan", "> ")]),
        multiline=True,  # the key bindings below decide when it ends
        prompt_continuation="  ",
        key_bindings=_key_bindings(),
        history=_history(history_file),
        completer=_completer(commands),
        complete_while_typing=False,
        enable_suspend=True,
        enable_open_in_editor=True,
        input_processors=[TabsProcessor(char1=" ", char2=" ")],
        color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
        output=create_output(always_prefer_tty=True),  # with the answers in a file, the prompt is still on the screen
        reserve_space_for_menu=4,
    )
    while True:
        try:
            yield session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                on_interrupt()


def history_path() -> Path:
    from tonle.config.gateway import default_state_db

    return default_state_db().with_name(HISTORY_NAME)


def is_interactive() -> bool:
    return sys.stdin.isatty()


def _next_line(text: str) -> str:
    """`text`, ready for another line: the backslash that asked for it is gone."""
    return (text if text.lstrip().startswith(QUOTES) else text.removesuffix("\\")) + "\n"


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()
    editing = has_focus(DEFAULT_BUFFER)  # and not searching with Ctrl-R, where Enter takes what was found

    @bindings.add("enter", filter=editing)
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if not is_open(buffer.text):
            buffer.validate_and_handle()
            return
        text = _next_line(buffer.text)
        buffer.set_document(type(buffer.document)(text, len(text)))

    @bindings.add("escape", "enter", filter=editing)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history(path: Path | None) -> History:
    """In the file, readable by its owner only; in memory where the file cannot be used."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            pass
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _completer(commands: list[str]) -> Completer:
    """Tab completes the name of a command."""
    from prompt_toolkit.completion import WordCompleter

    return WordCompleter(commands, sentence=True)
