"""`tonle deploy render KIND`: the documents of a platform, from one settings file. Never loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tonle.cli.flags import with_flags
from tonle.cli.screen import stderr
from tonle.config.deploy import DEPLOY_SETTINGS
from tonle.config.load_settings import load_deploy
from tonle.deploy.document import RenderedFile
from tonle.deploy.render import KINDS
from tonle.errors import ConfigError

deploy = typer.Typer(
    add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True
)


@deploy.callback()
def about() -> None:
    """Write the documents that run a server on KServe, llm-d, Kubernetes, Docker, RunPod or systemd."""


# One line per kind: two line breaks are one in the end.
_KIND = "What to write:\n\n" + "\n\n".join(f"[bold]{kind}[/bold]: {what}" for kind, what in KINDS.items())


@deploy.command("render")
@with_flags(*DEPLOY_SETTINGS, table=DEPLOY_SETTINGS)
def render_documents(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=_KIND, show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE",
            help="Settings of `tonle serve`, and a section `deploy:` with those below. Without one: the default model.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write files there instead of printing them.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="With --output: replace files that are different.", show_default=False)
    ] = False,
    *,
    flags: dict[str, Any],
) -> None:  # fmt: skip
    """Print the documents of a platform, or write them to a folder.

    [dim]Example:[/dim]  tonle deploy render kserve --config tonle.yaml --output deploy/
    """
    from tonle.deploy.render import render
    from tonle.deploy.workload import Workload

    if kind not in KINDS:
        raise ConfigError(f"KIND must be one of {', '.join(KINDS)}, not {kind!r}", param="kind")
    files = render(kind, Workload.of(*load_deploy(flags, file=config)))
    if output is not None:
        try:
            _write(files, output, force=force)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {output}: {error.filename}: {error.strerror}; choose another --output", param="output"
            ) from error
        return
    typer.echo(_stream(files), nl=False)
    if beside := [file.name for file in _beside(files)]:
        stderr().print(f"Not printed: {', '.join(beside)}. Use --output FOLDER to write all files.", markup=False)


@deploy.command(
    "runpod-worker",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def runpod_worker(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Those of `tonle serve`.", show_default=False)
    ] = None,
) -> None:
    """Answer the jobs of a RunPod serverless endpoint with a local `tonle serve`; takes the same arguments."""
    from tonle.deploy.runpod_worker import run
    from tonle.telemetry import logs

    logs.configure("INFO", json=False)
    run(list(arguments or ()))


def _write(files: list[RenderedFile], folder: Path, *, force: bool) -> None:
    """All of them or none: what stands there and is different was written by hand, or from other settings."""
    texts = {folder / file.name: file.text for file in files}
    there = {path: path.read_text(encoding="utf-8", errors="replace") for path in texts if path.exists()}
    different = [str(path) for path, text in there.items() if text != texts[path]]
    if different and not force:
        raise ConfigError(
            f"{', '.join(different)} would be replaced by something else; add --force to do that, or choose another --output",
            param="output",
        )
    for path, text in texts.items():
        if there.get(path) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        stderr().print(f"{'unchanged' if there.get(path) == text else 'wrote'} {path}", markup=False)


def _stream(files: list[RenderedFile]) -> str:
    """One stream of YAML, as `kubectl apply -f -` reads it; a file's name stands above it."""
    beside = _beside(files)
    shown = [file for file in files if file not in beside]
    if len(shown) == 1:
        return shown[0].text
    return "---\n".join(f"# {file.name}\n{file.text}" for file in shown)


def _beside(files: list[RenderedFile]) -> list[RenderedFile]:
    """Files that are no documents, such as values of a chart, next to files that are."""
    return [file for file in files if file.body] if any(file.documents for file in files) else []
