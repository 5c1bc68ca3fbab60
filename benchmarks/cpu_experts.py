"""What experts cost on a CPU: steps of a mixture against those of a plain decoder with as many weights per token, in turns.

    python -m benchmarks.cpu_experts [--layers 2] [--threads 2] [--repeats 15] [--bits 4]

The mixture has layers of OLMoE-1B-7B's shape (64 experts of 1,024, 8 of them per token) with random 4- or 8-bit weights; the
plain one has perceptrons of 8,192 in their place. With one token both read the same bytes: what is above 1 is routing. With
several tokens the plain one reads its weights once for all, the mixture those of every expert that some token chose; the last
column says how many times as many weights that is, on average. Steps take turns; a time is the lower quartile of its repeats,
since other programs disturb a shared machine. With `--threads 1` it is processor time, which they disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tonle.config.cores import num_cores
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.pack import pack
from tonle.models.cpu.stored import Stored
from tonle.models.cpu.team import Team
from tonle.models.cpu.vector import GROUP
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import EMBEDDING, tensor_shapes

EXPERTS, PER_TOKEN, SIZE, HIDDEN, VOCAB = 64, 8, 1024, 2048, 1024
TOKENS = (1, 4, 16, 64, 256)
BLOCK = 16


def spec_of(mixer: MixerSpec, layers: int) -> ModelSpec:
    attention = AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=128, rope=RopeSpec())
    return ModelSpec(architecture="OlmoeForCausalLM", vocab_size=VOCAB, hidden_size=HIDDEN, norm_eps=1e-5, max_positions=4096,
                     layers=(LayerSpec(attention=attention, mixer=mixer),) * layers)  # fmt: skip


def decoder_of(spec: ModelSpec, bits: int, team: Team) -> CpuDecoder:
    """With random weights: numbers of so many bits, routers and the rest in float32."""
    shapes, rng = tensor_shapes(spec), np.random.default_rng(0)

    def matrix(name: str) -> Stored:
        rows, columns = shapes[name]
        if name == EMBEDDING or name.endswith("mlp.gate.weight"):
            return Stored(rng.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5)
        low, high, kind = (0, 16, np.uint8) if bits == 4 else (-127, 128, np.int8)
        numbers = rng.integers(low, high, (rows, columns), dtype=kind)
        scale = np.full((rows, columns // GROUP), columns**-0.5 / high, dtype=np.float32)
        return Stored(numbers, scale, scale * (-7.5 if bits == 4 else 0.0))

    def vector(name: str) -> Any:
        return np.ones(shapes[name], dtype=np.float32)

    table = matrix(EMBEDDING)

    def embed(tokens: torch.Tensor, out: Any) -> None:
        out[...] = table.take(tokens.numpy()).floats()

    return CpuDecoder(spec, pack(spec, matrix, vector), embed, None, team=team)


class Steps:
    """Prompts of a decoder, each a step."""

    def __init__(self, decoder: CpuDecoder, clock: Callable[[], float]) -> None:
        spec = decoder.spec
        self._clock = clock
        self._decoder, self._blocks = decoder, -(-max(TOKENS) // BLOCK)
        self._kv = KVCache(num_layers=spec.num_layers, num_blocks=self._blocks, block_size=BLOCK, head_dim=spec.head_dim,
                           num_kv_heads=spec.num_kv_heads, dtype=torch.float32, device=torch.device("cpu"))  # fmt: skip

    @torch.inference_mode()
    def seconds(self, count: int) -> float:
        places = torch.arange(count)
        tokens = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count))
        inputs = StepInputs(
            tokens=tokens, positions=places, slots=places, row_starts=[0, count], context_lens=[count],
            block_tables=torch.arange(self._blocks, dtype=torch.int32)[None], num_decode=int(count == 1),
            logit_indices=places,
        )  # fmt: skip
        began = self._clock()
        self._decoder.forward(inputs, self._kv)
        return self._clock() - began


def expected_experts(count: int) -> float:
    """How many of them are chosen by some of `count` tokens that choose at random."""
    return EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    options = parser.parse_args()
    team, clock = Team(options.threads), time.thread_time if options.threads == 1 else time.perf_counter
    mixture = MixerSpec(kind="experts", size=SIZE, num_experts=EXPERTS, experts_per_token=PER_TOKEN)
    ways = {
        name: Steps(decoder_of(spec_of(mixer, options.layers), options.bits, team), clock)
        for name, mixer in {"experts": mixture, "plain": MixerSpec(size=PER_TOKEN * SIZE)}.items()
    }
    table = Table("tokens", "experts, ms", "plain, ms", "ratio", "weights read, ratio")
    for count in TOKENS:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.repeats + 2):
            for name, steps in ways.items():
                took = steps.seconds(count)
                if turn >= 2:  # the first ones compile, and touch memory
                    times[name].append(took)
        ours, plain = (statistics.quantiles(times[name])[0] for name in ("experts", "plain"))
        table.add_row(str(count), f"{1000 * ours:.2f}", f"{1000 * plain:.2f}", f"{ours / plain:.2f}",
                      f"{expected_experts(count) / PER_TOKEN:.2f}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
