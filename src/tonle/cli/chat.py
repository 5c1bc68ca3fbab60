"""`tonle chat`: the command line of it. The conversation itself is in `chat_session.py`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from tonle.cli import screen, typed
from tonle.cli.answer_options import MaxTokensOption, SeedOption, SystemOption, TemperatureOption, TopPOption
from tonle.cli.backends import AnswerOptions, ChatBackend
from tonle.cli.chat_session import ChatSession
from tonle.cli.conversation import Conversation
from tonle.cli.device import check_device
from tonle.cli.flags import ENGINE_FLAGS, ConfigOption, ModelArgument, with_flags
from tonle.config.load_settings import load


@with_flags(*ENGINE_FLAGS)
def chat(
    model: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Talk to this OpenAI-compatible server instead of starting an engine. "
            "MODEL is then a name that the server knows; default: the first one it lists. Proxies are not used.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="API key for the server at --url.",
            envvar="OPENAI_API_KEY",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history/--no-history",
            metavar="",
            help="Keep what you type for the next session. Default: yes.",
            show_default=False,
        ),
    ] = True,
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

    Starts an engine, or talks to a running server with --url. Type /help in the chat for its commands.
    If standard input is a pipe, each line is one message.

    [dim]Example:[/dim]  tonle chat --system "You are a pirate."
    [dim]Example:[/dim]  tonle chat --url http://127.0.0.1:8000
    """
    if url is not None and (flags or config):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in (*flags, *(("config",) if config else ())))
        raise typer.BadParameter(f"{given} cannot be used with it: no engine is started here", param_hint="--url")
    options = AnswerOptions(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    if url is not None:
        from tonle.cli.backends.remote import RemoteBackend

        backend: ChatBackend = RemoteBackend(url, model=model, api_key=api_key)
    else:
        backend = _local(flags | ({"model": model} if model else {}), config)
    with screen.typing_ahead(), asyncio.Runner() as runner:
        try:
            with screen.stderr().status(f"Loading {backend.name}"):
                runner.run(backend.start())
            history_file = typed.history_path() if history else None
            ChatSession(runner, backend, Conversation(system), options, history_file=history_file).run()
        finally:
            runner.run(backend.close())


def _local(flags: dict[str, Any], config: Any) -> ChatBackend:
    from tonle.cli.backends.local import LocalBackend
    from tonle.models.source import resolve
    from tonle.telemetry import logs

    settings = load(flags, file=config)
    check_device(settings.device)
    logs.configure("WARNING")
    return LocalBackend(resolve(settings.model, chat_template=settings.chat_template), settings.engine(), chats=True)
