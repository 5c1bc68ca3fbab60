"""`ChatSession`: the loop of `tonle chat`, which reads a message, shows the answer, and keeps both."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tonle.cli import screen, typed
from tonle.cli.answer_options import summary
from tonle.cli.backends import AnswerOptions, AnswerStats, ChatBackend
from tonle.cli.chat_commands import EXIT, Commands
from tonle.cli.conversation import Conversation
from tonle.errors import ContextOverflow, InvalidRequest, TonleError


class ChatSession:
    """The event loop runs only while an answer is being read: at the prompt, the keyboard belongs to the line editor."""

    def __init__(
        self,
        runner: asyncio.Runner,
        backend: ChatBackend,
        conversation: Conversation,
        options: AnswerOptions,
        *,
        history_file: Path | None = None,
    ) -> None:
        self._runner = runner
        self._backend = backend
        self._conversation = conversation
        self._commands = Commands(backend.name, conversation, options)
        self._history_file = history_file
        self._interactive = typed.is_interactive()
        self._out = screen.stdout()
        # With answers going to a file, notes about them do not belong there.
        self._notes = self._out if self._out.is_terminal else screen.stderr()

    def run(self) -> None:
        """Until /exit, Ctrl-D or the end of the pipe."""
        if self._interactive:
            self._notes.print(
                f"[bold green]{self._backend.name}[/bold green]  [dim]/help for commands, Ctrl-D to leave[/dim]"
            )
        for text in self._texts():
            message = typed.message_of(text)
            if message in EXIT:
                return
            if self._is_command(text):
                self._command(message)
            elif message:
                self._converse(message)

    def _texts(self) -> Iterator[str]:
        if not self._interactive:
            return typed.from_pipe(sys.stdin)
        return typed.from_terminal(
            colour=self._out.color_system is not None,
            history_file=self._history_file,
            commands=self._commands.names,
            on_interrupt=lambda: self._note("Ctrl-D or /exit to leave"),
        )

    def _is_command(self, text: str) -> bool:
        """Pasted text may start with a slash, too, without being one."""
        return text.startswith("/") and ("\n" not in text.strip() or self._commands.has(text.split()[0]))

    def _command(self, line: str) -> None:
        try:
            self._note(self._commands.run(line))
        except InvalidRequest as error:
            self._note(error.message)
        if self._interactive:
            self._notes.print()

    def _converse(self, text: str) -> None:
        self._conversation.ask(text)
        stats = AnswerStats()
        pieces: list[str] = []
        try:
            if self._interactive:
                screen.mark_pasted_text(on=True)  # the line editor has switched it off
            self._answer(pieces, stats)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except TonleError as error:
            self._conversation.take_back()
            if not self._interactive:
                raise
            screen.show_error(error)
            return
        if pieces:
            self._conversation.answer("".join(pieces))
            self._note(summary(stats))
        else:
            self._conversation.take_back()
            if not self._out.is_terminal:
                self._out.print()  # one message, one line
            self._note(f"no answer: {'stopped' if stats.finish_reason is None else 'the model said nothing'}")
        self._notes.print()

    def _answer(self, pieces: list[str], stats: AnswerStats) -> None:
        """Fill `pieces`; drop the oldest messages of the conversation until the rest leaves room for an answer."""
        num_dropped = 0
        while True:
            try:
                self._runner.run(self._read(pieces, stats))
                return
            except ContextOverflow:
                if not self._conversation.forget_oldest():
                    raise
                num_dropped += 2
                self._note(f"the context is full: forgot the {num_dropped} oldest messages")

    async def _read(self, pieces: list[str], stats: AnswerStats) -> None:
        answer = self._backend.answer(self._conversation.messages, self._commands.options, stats)
        with screen.streaming(self._out) as write:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    pieces.append(piece)
                    write(piece)

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, soft_wrap=not self._notes.is_terminal)
