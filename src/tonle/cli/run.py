"""`tonle run`: one prompt, one answer. The answer goes to standard output, everything about it to standard error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from tonle.cli import screen
from tonle.cli.device import check_device
from tonle.cli.flags import ENGINE_FLAGS, ConfigOption, with_flags
from tonle.cli.sampling import (
    MaxTokensOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TopPOption,
    summary,
)
from tonle.cli.voices import Message, Prompt, Sampling, Tally, Voice
from tonle.config.load import load


@with_flags("model", *ENGINE_FLAGS)
def run(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer; - reads it from standard input.")],
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", metavar="", help="Continue the prompt as it is, without a chat template.", show_default=False
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print answer and statistics as one JSON object.", show_default=False),
    ] = False,
    system: SystemOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Answer one prompt and leave.

    The answer goes to standard output as it comes, statistics to standard error.

    [dim]Example:[/dim]  tonle run "Why is the sky blue?" --temperature 0
    [dim]Example:[/dim]  git diff | tonle run - --system "Write a commit message for this change."
    """
    if raw and system:
        raise typer.BadParameter("there is no place for it in a raw prompt", param_hint="--system")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    from tonle.cli.voices.engine import EngineVoice
    from tonle.models.source import resolve
    from tonle.telemetry import logs

    settings = load(flags, file=config)
    logs.configure("WARNING")
    check_device(settings.device)
    voice = EngineVoice(resolve(settings.model, chat_template=settings.chat_template), settings.engine(), chats=not raw)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    asyncio.run(_run(voice, text if raw else _chat(text, system), sampling, as_json=as_json))


def _chat(text: str, system: str | None) -> list[Message]:
    told = [{"role": "system", "content": system}] if system else []
    return [*told, {"role": "user", "content": text}]


async def _run(voice: Voice, prompt: Prompt, sampling: Sampling, *, as_json: bool) -> None:
    tally, text = Tally(), ""
    notes = screen.stderr()
    try:
        with notes.status(f"Loading {voice.name}"):
            await voice.start()
        async with contextlib.aclosing(voice.answer(prompt, sampling, tally)) as pieces:
            async for piece in pieces:
                text += piece
                if not as_json:
                    _write(piece)
    finally:
        await voice.close()
    if as_json:
        typer.echo(json.dumps(_report(voice.name, text, tally), ensure_ascii=False))
        return
    if not text.endswith("\n"):
        _write("\n")
    notes.print(f"[dim]{summary(tally, tally.max_tokens)}[/dim]")


def _write(text: str) -> None:
    """Control characters are data for a file and orders for a terminal."""
    sys.stdout.write(screen.harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _report(model: str, text: str, tally: Tally) -> dict[str, Any]:
    return {
        "model": model,
        "text": text,
        "finish_reason": tally.finish_reason,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "ttft_s": tally.ttft_s,
        "tokens_per_s": tally.tokens_per_s,
    }
