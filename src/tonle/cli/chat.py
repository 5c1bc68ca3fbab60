"""`tonle chat`: a conversation in the terminal, or one message per line of a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tonle.cli import screen
from tonle.cli.conversation import Conversation
from tonle.cli.device import check_device
from tonle.cli.flags import ENGINE_FLAGS, ConfigOption, ModelArgument, with_flags
from tonle.cli.sampling import (
    MaxTokensOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TopPOption,
    summary,
)
from tonle.cli.voices import Sampling, Tally, Voice
from tonle.config.load import load
from tonle.errors import ContextOverflow, TonleError

_HELP = """\
  /system TEXT  tell the model who it is, from now on
  /reset        begin a new conversation
  /exit         leave (as does Ctrl-D)
  Ctrl-C        stop the answer"""


@with_flags(*ENGINE_FLAGS)
def chat(
    model: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Talk to this OpenAI-compatible server rather than to an engine of our own. "
            "MODEL is then the server's name for it; by default the first it lists.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="For --url.", envvar="OPENAI_API_KEY", show_default=False),
    ] = None,
    system: SystemOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Chat with a model in the terminal.

    Starts an engine of its own, or talks to a running server with --url. Type /help inside for the commands.
    With standard input from a pipe, every line is one message.

    [dim]Example:[/dim]  tonle chat --system "You are a pirate."
    [dim]Example:[/dim]  tonle chat --url http://127.0.0.1:8000
    """
    if url is not None and (flags or config):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in (*flags, *(("config",) if config else ())))
        raise typer.BadParameter(f"{given} is for an engine of our own; leave it out", param_hint="--url")
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    if url is not None:
        from tonle.cli.voices.remote import RemoteVoice

        voice: Voice = RemoteVoice(url, model=model, api_key=api_key)
    else:
        voice = _own_engine(flags | ({"model": model} if model else {}), config)
    with asyncio.Runner() as runner:
        try:
            with screen.stderr().status(f"Loading {voice.name}"):
                runner.run(voice.start())
            Chat(runner, voice, sampling, Conversation(system)).run()
        finally:
            runner.run(voice.close())


def _own_engine(flags: dict[str, Any], config: Any) -> Voice:
    from tonle.cli.voices.engine import EngineVoice
    from tonle.models.source import resolve
    from tonle.telemetry import logs

    settings = load(flags, file=config)
    check_device(settings.device)
    logs.configure("WARNING")
    return EngineVoice(resolve(settings.model, chat_template=settings.chat_template), settings.engine(), chats=True)


class Chat:
    """Owns the terminal's side of a conversation. The event loop runs only while an answer is being read, so that
    line editing and Ctrl-C at the prompt are the terminal's own."""

    def __init__(self, runner: asyncio.Runner, voice: Voice, sampling: Sampling, conversation: Conversation) -> None:
        self._runner = runner
        self._voice = voice
        self._sampling = sampling
        self._conversation = conversation
        self._interactive = sys.stdin.isatty()
        self._out = screen.stdout()
        # Beside an answer that goes into a file, remarks about it would be in the way.
        self._notes = self._out if self._out.is_terminal else screen.stderr()

    def run(self) -> None:
        """Until /exit, Ctrl-D or the end of the pipe."""
        if self._interactive:
            self._notes.print(
                f"[bold green]{self._voice.name}[/bold green]  [dim]/help for commands, Ctrl-D to leave[/dim]"
            )
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._converse(text)

    def _lines(self) -> Iterator[str]:
        if not self._interactive:
            yield from sys.stdin
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() line editing and a history)
        prompt = "\x01\x1b[1;36m\x02> \x01\x1b[0m\x02" if self._out.color_system else "> "  # \x01, \x02: takes no width
        while True:
            try:
                yield input(prompt)
            except EOFError:
                self._notes.print()
                return
            except KeyboardInterrupt:
                self._notes.print("\n[dim]Ctrl-D or /exit to leave[/dim]")

    def _obey(self, command: str) -> None:
        name, _, rest = command.partition(" ")
        if name == "/help":
            self._notes.print(_HELP, markup=False)
        elif name == "/reset":
            self._conversation.reset()
            self._remark("a new conversation")
        elif name == "/system":
            self._conversation.system = rest.strip() or self._conversation.system
            self._remark(f"system: {self._conversation.system or 'nothing is set'}")
        else:
            self._remark(f"there is no command {name}; /help lists them")

    def _converse(self, text: str) -> None:
        self._conversation.ask(text)
        tally = Tally()
        said: list[str] = []
        try:
            self._answer(said, tally)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except TonleError as error:
            self._conversation.take_back()
            if not self._interactive:
                raise
            screen.show_error(error)
            return
        self._out.print()
        self._remark(summary(tally, tally.max_tokens))
        self._notes.print()
        if said:
            self._conversation.answer("".join(said))
        else:
            self._conversation.take_back()

    def _answer(self, said: list[str], tally: Tally) -> None:
        """Fill `said`, forgetting the oldest of the conversation until the rest leaves room for an answer."""
        num_forgotten = 0
        while True:
            try:
                self._runner.run(self._read(said, tally))
                return
            except ContextOverflow:
                if not self._conversation.forget_oldest():
                    raise
                num_forgotten += 2
                self._remark(f"the context is full: forgot the {num_forgotten} oldest messages")

    async def _read(self, said: list[str], tally: Tally) -> None:
        answer = self._voice.answer(self._conversation.messages, self._sampling, tally)
        async with contextlib.aclosing(answer) as pieces:
            async for piece in pieces:
                said.append(piece)
                self._out.print(screen.harmless(piece), end="", markup=False, emoji=False)

    def _remark(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False)
