"""What few bits cost in accuracy: size and perplexity of a model in each form, on the text of this project's documents.

    python -m benchmarks.perplexity [MODEL] [--forms none,auto,int8,int8:32,int4,int4:64,int4:32,fp8] [--activation-bits 16,8]

A form is `none` (weights unpacked, the first and what the others are compared with), `auto` (as stored), or one of
`--quantization`, with a group size after a colon. Each is opened as a server would open it on this machine, and reads the text
in windows, each token with those before it in its window; what is counted is the mean loss of all but the first of each
window. No time is measured: nothing here depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tonle.engine.text import load_text
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.layers import Linear, Quantized
from tonle.models.load import load
from tonle.models.quantize import Quantization
from tonle.models.source import ModelSource, resolve

PAGES = ("walk.md", "guide.md", "adapters.md", "gateway.md")  # of docs/
BLOCK = 16  # tokens of a KV block


@dataclass(frozen=True, slots=True)
class Score:
    num_bytes: int  # of all matrices but the embedding
    loss: float  # natural logarithm, per token
    best: torch.Tensor  # (tokens,) the token it found likeliest at each place

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def quantization(form: str) -> Quantization | None:
    name, _, size = form.partition(":")
    if name == "auto":
        return None
    if name not in ("none", "int8", "int4", "fp8"):
        raise SystemExit(f"{form}: a form is none, auto, int8, int4 or fp8, with :GROUP after it")
    return Quantization(name, int(size or 128))  # type: ignore[arg-type]


def open_decoder(source: ModelSource, form: str, device: torch.device, activation_bits: int) -> Any:
    if device.type == "cpu":
        how = quantization(form)
        return open_cpu(source, quantization=how, activation_bits=activation_bits, wait_for_kernels=True)
    return load(source, device=device, quantization=quantization(form))


@torch.inference_mode()
def score(decoder: Any, tokens: torch.Tensor, window: int) -> Score:
    losses, best = [], []
    for part in tokens.split(window):
        logits = _logits(decoder, part).float()
        wanted = part[1:].to(logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum"))
        best.append(logits[:-1].argmax(dim=-1).cpu())
    counted = len(tokens) - len(losses)
    return Score(matrix_bytes(decoder), float(sum(losses)) / counted, torch.cat(best))


def _logits(decoder: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(tokens, vocab) of one sequence in one step."""
    spec, count = decoder.spec, len(tokens)
    num_blocks = -(-count // BLOCK)
    kv = KVCache(num_layers=spec.num_layers, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
                 head_dim=spec.head_dim, dtype=decoder.dtype, device=decoder.device)  # fmt: skip
    places = torch.arange(count, device=decoder.device)
    inputs = StepInputs(
        tokens=tokens.to(decoder.device), positions=places, slots=places, row_starts=[0, count], context_lens=[count],
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=decoder.device)[None], num_decode=0,
        logit_indices=places,
    )  # fmt: skip
    logits: torch.Tensor = decoder.forward(inputs, kv)
    return logits


def matrix_bytes(decoder: Any) -> int:
    if isinstance(decoder, CpuDecoder):
        return sum(part.nbytes for matrix in decoder._matrices() for part in matrix)
    return sum(_linear_bytes(linear) for linear in _linears(decoder))


def _linears(decoder: Any) -> Iterator[Linear]:
    for layer in decoder.weights.layers:
        yield from (layer.qkv, layer.o)
        if layer.experts is None:
            yield from (layer.gate_up, layer.down)
        else:
            for expert in layer.experts.experts:
                yield from (expert.gate_up, expert.down)
    yield decoder.weights.lm_head


def _linear_bytes(linear: Linear) -> int:
    found = 0
    for part in linear.parts:
        if isinstance(part.weight, Quantized):
            extra = [each for each in (part.weight.scale, part.weight.minimum) if each is not None]
            found += part.weight.numbers.nbytes * part.weight.bits // 8 + sum(each.nbytes for each in extra)
        else:
            found += part.weight.nbytes
    return found


def text_tokens(source: ModelSource, file: Path | None, count: int) -> torch.Tensor:
    folder = Path(__file__).parents[1] / "docs"
    text = file.read_text() if file else "\n".join((folder / page).read_text() for page in PAGES)
    tokens = load_text(source).encode(text)
    if len(tokens) < count:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --tokens {count}")
    return torch.tensor(tokens[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--forms", default="none,auto,int8,int8:32,int4,int4:64,int4:32,fp8")
    parser.add_argument("--activation-bits", default="16", help="on a CPU, for each form: 16, 8 or both")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, help="another text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    source, device = resolve(options.model), torch.device(options.device)
    tokens = text_tokens(source, options.text, options.tokens)
    table = Table(
        "form", "matrices, MB", "perplexity", "change", "same best token", title=f"{source.name}, {len(tokens)} tokens"
    )
    first: Score | None = None
    for form in options.forms.split(","):
        for bits in options.activation_bits.split(",") if device.type == "cpu" else [""]:
            decoder = open_decoder(source, form, device, int(bits or 16))
            found = score(decoder, tokens, options.window)
            del decoder
            first = first or found
            same = float((found.best == first.best).float().mean())
            name = f"{form}, {bits}-bit activations" if "," in options.activation_bits else form
            change = found.perplexity / first.perplexity - 1
            table.add_row(
                name, f"{found.num_bytes / 1e6:.1f}", f"{found.perplexity:.4f}", f"{change:+.3%}", f"{same:.2%}"
            )
            Console(stderr=True).print(f"{name}: {found.perplexity:.4f} ({change:+.3%})")
    Console().print(table)


if __name__ == "__main__":
    main()
