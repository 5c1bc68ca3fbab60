"""`RooflineTimes`: how long steps take on a device that is known by its data sheet alone. A `StepTimes` of the simulator.

A step is three things one after the other, and what surrounds them:

    products    reading the weights and multiplying with them overlap: √(read² + multiply²), between the longer and the sum
    attention   keys and values of decoding rows are read; scores of prompts are multiplied
    the rest    what products write and the next ones read, logits; launches, a fixed time per layer; with several GPUs, two
                all-reduces per layer

Does: seconds from counts. Does not: know queues or schedulers: the simulator runs the real ones. The shares of the data sheet
that are reached (`Efficiency`) were chosen once from steps measured on an H200 with two models; docs/sizing.md lays them side
by side.
"""

from __future__ import annotations

import math

import msgspec

from tonle.advise.gpus import DataSheet
from tonle.advise.precision import KvPrecision, Precision
from tonle.advise.shape import ModelShape
from tonle.engine.schedule.step_facts import StepWork

_ACTIVATION_BYTES = 4  # per output of a product and token: written and read again, in 16 bits
_LOGIT_BYTES = 12  # per word of the vocabulary and token drawn: 4 bytes, written once and read twice
_STATE_BYTES = 2  # of what GPUs send each other


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What is reached of a data sheet. From measured steps on one H200, but for those marked as assumed."""

    bandwidth: float = 0.88
    products: float = 0.7  # of the operations per second: large products
    int4_products: float = 0.9  # of that: weights are unpacked on the way (assumed)
    attention: float = 0.33  # of prompts: of bf16's operations per second
    row_layer_s: float = 9.5e-6  # per layer of a step with one row: launches and latencies that nothing hides
    layer_s: float = 25e-6  # the same in steps of several rows or prompts
    link: float = 0.75  # of the link between GPUs (assumed)
    all_reduce_s: float = 10e-6  # each, besides what it sends (assumed: NVLink and the like)
    pcie_all_reduce_s: float = 30e-6  # the same over PCIe (assumed)


class RooflineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica: `gpus` of them compute every layer together (tensor parallel)."""

    shape: ModelShape
    gpu: DataSheet
    precision: Precision
    kv: KvPrecision
    gpus: int = 1
    efficiency: Efficiency = Efficiency()
    front_s: float = 0.8e-3  # tokenizing a chat's prompt and HTTP
    back_s: float = 0.2e-3
    host_fixed_s: float = 0.3e-3  # of the loop's thread per step: measured, with an H200's host
    host_row_s: float = 3.5e-6
    host_prompt_s: float = 0.2e-3  # per prompt in it

    @property
    def lag(self) -> int:
        """As on every GPU: the next step is launched before this one is read."""
        return 1

    def jitter(self, work: StepWork, u: float) -> float:
        """A data sheet knows no scatter."""
        return 1.0

    def host_s(self, work: StepWork) -> float:
        return self.host_fixed_s + self.host_row_s * work.rows + self.host_prompt_s * work.prompts

    def device_s(self, work: StepWork) -> float:
        tokens = work.rows + work.tokens
        if not tokens:
            return 0.0
        return (
            math.hypot(self.read_weights_s(tokens), self.multiply_s(tokens, work.samples))
            + self.read_kv_s(work.decode_reads)
            + self.score_prompts_s(work.prompt_reads)
            + self._rest_s(tokens, work.samples)
            + self._launch_s(work)
            + self.all_reduce_s(tokens)
        )

    # -- the parts, each in seconds

    def read_weights_s(self, tokens: int = 1) -> float:
        return self.shape.read_bytes(self.precision, tokens) / (
            self.gpus * self.gpu.bandwidth * self.efficiency.bandwidth
        )

    def multiply_s(self, tokens: int, samples: int) -> float:
        share = self.efficiency.products * (self.efficiency.int4_products if self.precision.name == "int4" else 1.0)
        blocks = 2 * self.shape.active_block_parameters * tokens / self.gpu.rate(self.precision.rate)
        head = 2 * self.shape.head_parameters * samples / self.gpu.bf16
        return (blocks + head) / (self.gpus * share)

    def read_kv_s(self, reads: int) -> float:
        """GPUs beyond the number of KV heads hold copies: they save no time here."""
        split = min(self.gpus, self.shape.kv_heads)
        return reads * self.shape.kv_bytes_per_token(self.kv) / (split * self.gpu.bandwidth * self.efficiency.bandwidth)

    def score_prompts_s(self, reads: int) -> float:
        """Queries times keys, scores times values: 4 operations per number of the heads."""
        operations = 4 * self.shape.attention_size * self.shape.layers * reads
        return operations / (self.gpus * self.gpu.bf16 * self.efficiency.attention)

    def all_reduce_s(self, tokens: int) -> float:
        """Two per layer: after attention and after the mixer, each sends 2·(N−1)/N of the tokens' hidden states."""
        if self.gpus == 1:
            return 0.0
        sent = 2 * (self.gpus - 1) / self.gpus * tokens * self.shape.hidden_size * _STATE_BYTES
        pcie = self.gpu.link_name.startswith("PCIe")
        fixed = self.efficiency.pcie_all_reduce_s if pcie else self.efficiency.all_reduce_s
        return 2 * self.shape.layers * (fixed + sent / (self.gpu.link * self.efficiency.link))

    def _rest_s(self, tokens: int, samples: int) -> float:
        outputs = self.shape.active_block_parameters / self.shape.hidden_size
        vocabulary = self.shape.head_parameters / self.shape.hidden_size
        moved = tokens * outputs * _ACTIVATION_BYTES + samples * vocabulary * _LOGIT_BYTES
        return moved / (self.gpus * self.gpu.bandwidth * self.efficiency.bandwidth)

    def _launch_s(self, work: StepWork) -> float:
        alone = work.rows == 1 and not work.prompts
        return self.shape.layers * (self.efficiency.row_layer_s if alone else self.efficiency.layer_s)

    # -- steps that reports name

    def decode_s(self, rows: int, context: float) -> float:
        """A step in which `rows` sequences of so many tokens each decode."""
        return self.device_s(StepWork(rows, 0, 0, round(rows * context), 0, rows))

    def prompt_s(self, tokens: int, chunk: int, depth: int = 0) -> float:
        """A prompt alone, `chunk` tokens per step, after `depth` tokens that were computed before."""
        done, seconds = 0, 0.0
        while done < tokens:
            size = min(chunk, tokens - done)
            last = done + size == tokens
            seconds += self.device_s(StepWork(0, 1, size, 0, size * (depth + done + size // 2), int(last)))
            done += size
        return seconds

    def mixed_s(self, rows: int, context: float, tokens: int, depth: float) -> float:
        """A step in which `rows` decode and `tokens` of a prompt are computed, `depth` of which were computed before."""
        reads = round(tokens * (depth + tokens / 2))
        return self.device_s(StepWork(rows, 1 if tokens else 0, tokens, round(rows * context), reads, rows))
