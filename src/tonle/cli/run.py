"""`tonle run`: one prompt, one answer. The answer goes to standard output, all else to standard error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from tonle.cli import screen
from tonle.cli.answer_options import MaxTokensOption, SeedOption, SystemOption, TemperatureOption, TopPOption, summary
from tonle.cli.backends import AnswerOptions, AnswerStats, ChatBackend, Message, Prompt
from tonle.cli.device import check_device
from tonle.cli.flags import ENGINE_FLAGS, ConfigOption, with_flags
from tonle.config.load_settings import load


@with_flags("model", *ENGINE_FLAGS)
def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt; - or nothing reads it from standard input.", show_default=False
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", metavar="", help="Continue the prompt as it is, without a chat template.", show_default=False
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="Print the answer and its statistics as one JSON object.", show_default=False
        ),
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
    """Answer one prompt and exit.

    The answer is streamed to standard output; statistics go to standard error.

    [dim]Example:[/dim]  tonle run "Why is the sky blue?" --temperature 0
    [dim]Example:[/dim]  git diff | tonle run - --system "Write a commit message for this change."
    """
    if raw and system:
        raise typer.BadParameter("it cannot be combined with --raw", param_hint="--system")
    if prompt is None:
        prompt = "" if sys.stdin.isatty() else "-"
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty; give one, or pipe it in", param_hint="PROMPT")
    from tonle.cli.backends.local import LocalBackend
    from tonle.models.source import resolve
    from tonle.telemetry import logs

    settings = load(flags, file=config)
    logs.configure("WARNING")
    check_device(settings.device)
    backend = LocalBackend(
        resolve(settings.model, chat_template=settings.chat_template), settings.engine(), chats=not raw
    )
    options = AnswerOptions(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    asyncio.run(_run(backend, text if raw else _chat(text, system), options, as_json=as_json))


def _chat(text: str, system: str | None) -> list[Message]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


async def _run(backend: ChatBackend, prompt: Prompt, options: AnswerOptions, *, as_json: bool) -> None:
    stats, pieces = AnswerStats(), list[str]()
    notes = screen.stderr()
    try:
        with notes.status(f"Loading {backend.name}"):
            await backend.start()
        answer = backend.answer(prompt, options, stats)
        with contextlib.nullcontext(pieces.append) if as_json else screen.streaming(screen.stdout()) as take:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    take(piece)
    finally:
        await backend.close()
    if as_json:
        typer.echo(json.dumps(_report(backend.name, "".join(pieces), stats), ensure_ascii=False))
    else:
        notes.print(summary(stats), style="dim", markup=False)


def _report(model: str, text: str, stats: AnswerStats) -> dict[str, Any]:
    return {
        "model": model,
        "text": text,
        "finish_reason": stats.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "ttft_s": stats.ttft_s,
        "tokens_per_s": stats.tokens_per_s,
    }
