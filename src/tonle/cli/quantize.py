"""`tonle quantize`: a copy of a model with its weights in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tonle.cli import screen


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or hub name of a checkpoint that is not quantized.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    to: Annotated[
        Literal["int8", "int4", "fp8"],
        typer.Option(
            "--to", metavar="FORM", help="What the weights become: int8 (8-bit integers), int4, or fp8 (8-bit floats)."
        ),
    ],
    group_size: Annotated[
        int,
        typer.Option(
            "--group-size",
            metavar="N",
            help="int8, int4: weights that share a scale, a power of two; 0 = all of an output.",
        ),
    ] = 128,
) -> None:
    """Write a copy of a model with its weights in 8 or 4 bits.

    The copy is in the format of compressed-tensors, which Tonle, vLLM and transformers load. Embeddings and the last matrix
    stay as they are. To quantize without writing a copy, serve the model with --quantization.

    [dim]Example:[/dim]  tonle quantize Qwen/Qwen2.5-7B-Instruct ./qwen-int4 --to int4
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tonle.config.engine import EngineConfig
    from tonle.models.source import resolve
    from tonle.models.write_quantized import write_quantized

    EngineConfig(quantization=to, quantization_group_size=group_size).validate()
    source = resolve(model)
    columns = (TextColumn("Quantizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.stderr(), transient=True) as bar:
        task = bar.add_task("quantize", total=None)
        written = write_quantized(
            source, out.expanduser(), to, group_size, lambda done, total: bar.update(task, completed=done, total=total)
        )
    before, after = screen.size(written.before), screen.size(written.after)
    console = screen.stdout()
    console.print(f"[bold]{out}[/bold]: {written.num_matrices:,} matrices in {to}; {before} became {after}")
    console.print(f"[dim]Serve it:[/dim]  tonle serve {out}")
