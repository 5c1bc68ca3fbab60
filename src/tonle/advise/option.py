"""`Option`: one way to build a replica (precision × GPUs), the limits it would run with, and what latencies they allow.

Does: choose the batch, the step size and the prefill threshold from memory and from the SLO; floors and throughput from the
roofline. Does not: choose between options (`choose.py`) or know queues (`check.py` simulates those).
"""

from __future__ import annotations

import math

import msgspec

from tonle.advise.capacity import BLOCK, MIN_USERS, Capacity, capacity_of
from tonle.advise.precision import SERVED_ARCHITECTURES
from tonle.advise.roofline import RooflineTimes
from tonle.advise.units import bytes_text
from tonle.advise.workload import Workload
from tonle.bench.slo import Slo, duration_text
from tonle.config.engine import EngineConfig
from tonle.engine.schedule.limits import SchedulerLimits
from tonle.telemetry.percentile import percentile

# What a server on a GPU has by default: `max_num_seqs`, which CUDA graphs of decode steps go up to; `max_num_batched_tokens`.
MOST_ROWS, DEFAULT_STEP_TOKENS = EngineConfig(max_batch_size=None).batch_limits(gpu=True)
MOST_STEP_TOKENS, LEAST_STEP_TOKENS = 8192, 64
_STEP_ROUND, _FINE_ROUND = 128, 32  # tiles of products: 385 tokens cost as much as 512; finer below 512
_MARGIN = 0.9  # of an ITL limit is planned with: steps scatter
_JUDGED = 200  # requests that a floor of whole answers is taken of


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server. The names are those of `tonle serve`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_model_len: int
    kv_cache_dtype: str

    def limits(self, *, prefix_caching: bool = True) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            context_length=self.max_model_len,
            block_size=BLOCK,
            long_prefill_tokens=self.long_prefill_token_threshold,
            prefix_caching=prefix_caching,
        )


class Option(msgspec.Struct, frozen=True, kw_only=True):
    times: RooflineTimes
    capacity: Capacity
    fits: bool
    why_not: str  # "" if it fits
    settings: Settings | None = None  # None: it does not fit
    decode_one_ms: float = 0.0  # a step of one row: the TPOT floor of one user
    decode_full_ms: float = 0.0  # of `max_num_seqs` rows, no prompt in it
    mixed_ms: float = 0.0  # with prompts in it: what ITL p99 comes to
    tpot_ms: float = 0.0  # in a full batch, other requests' prompts included
    ttft_floor_ms: dict[str, float] = {}  # of an idle replica, by percentile of prompts
    request_s: float = 0.0  # of the replica, per request in a full batch
    misses: list[str] = []  # bounds of the SLO that even the floors miss

    @property
    def name(self) -> str:
        kv = ", fp8 KV" if self.times.kv.name == "fp8" else ""
        return f"{self.times.precision.name}{kv} × {self.times.gpus} {self.times.gpu.name}"

    @property
    def gpu_s(self) -> float:
        """GPU seconds per request: what a sizing costs."""
        return self.request_s * self.times.gpus

    @property
    def requests_per_s(self) -> float:
        return 1 / self.request_s if self.request_s else 0.0

    @property
    def holds(self) -> bool:
        """As far as floors tell."""
        return self.fits and not self.misses

    def with_threshold(self, tokens: int) -> Option:
        """The same, with another long_prefill_token_threshold."""
        assert self.settings is not None
        settings = msgspec.structs.replace(self.settings, long_prefill_token_threshold=tokens)
        return msgspec.structs.replace(self, settings=settings)

    @property
    def not_served(self) -> str:
        """Why Tonle's engine cannot serve it in this version; "" if it can."""
        return _why_not_served(self.times)


def _why_not_served(times: RooflineTimes) -> str:
    shape = times.shape
    if not times.gpu.served:
        return f"Tonle's engine has no kernels for {times.gpu.maker} GPUs"
    if shape.architecture and shape.architecture not in SERVED_ARCHITECTURES:
        return f"Tonle's engine does not serve {shape.architecture}"
    if not times.precision.served:
        return times.precision.why_not
    if times.gpus > 1:
        return (
            "Tonle's engine divides a model between GPUs without its CUDA kernels, which the project has not measured: "
            "tensor parallelism is vLLM's"
        )
    return ""


def build_option(
    times: RooflineTimes, workload: Workload, slo: Slo, context_length: int, most_rows: int = MOST_ROWS
) -> Option:
    """`most_rows`: no larger batch than that."""
    capacity = capacity_of(times, workload)
    why_not = _why_not(times, capacity, workload)
    if why_not:
        return Option(times=times, capacity=capacity, fits=False, why_not=why_not)
    best: tuple[float, int, int] | None = None
    fallback: tuple[float, int, int] | None = None  # where no batch keeps the SLO: the least of it
    for rows in _batches(min(capacity.users_safe, most_rows)):
        step = step_tokens(times, workload, slo, rows)
        seconds = request_s(times, workload, rows, step)
        found = (seconds, rows, step)
        fallback = found
        if _keeps(times, workload, slo, rows, step) and (best is None or seconds < best[0]):
            best = found
    assert fallback is not None
    seconds, rows, step = best or fallback
    return _described(times, capacity, workload, slo, rows, step, context_length)


def _why_not(times: RooflineTimes, capacity: Capacity, workload: Workload) -> str:
    shape, gpus = times.shape, times.gpus
    if shape.heads % gpus:
        return f"{shape.heads} heads cannot be divided among {gpus} GPUs"
    if not capacity.weights_fit:
        each = f" on each of {gpus}" if gpus > 1 else ""
        return f"weights need {bytes_text(capacity.weight_bytes)}{each}, {bytes_text(capacity.usable_bytes)} are usable"
    if capacity.kv_tokens < workload.longest:
        return f"{capacity.kv_tokens:,} tokens of KV are left; the longest request has {workload.longest:,}"
    if capacity.users_mean < MIN_USERS:
        return (
            f"{capacity.kv_tokens:,} tokens of KV are left: {capacity.users_mean} average requests at a time, fewer than "
            f"{MIN_USERS}, so that all weights are read for a handful of tokens"
        )
    return ""


def _batches(most: int) -> list[int]:
    """From large to small, some ten per octave at the top."""
    found, rows = [], float(most)
    while rows >= 1:
        found.append(int(rows))
        rows = min(rows / 1.08, int(rows) - 1)
    return found


def _limit_ms(slo: Slo, metric: str) -> float:
    return min((bound.limit_ms for bound in slo.bounds if bound.metric == metric), default=math.inf)


def step_tokens(times: RooflineTimes, workload: Workload, slo: Slo, rows: int) -> int:
    """Tokens of a step, decoding rows included: the most that keeps the ITL limit when a long prompt is among them."""
    limit_s = _MARGIN * _limit_ms(slo, "itl") / 1e3
    depth = workload.prompt_at(95) / 2
    if math.isinf(limit_s):
        return max(DEFAULT_STEP_TOKENS, rows)
    context = workload.held_mean + workload.shared_prefix
    size = MOST_STEP_TOKENS
    while size > LEAST_STEP_TOKENS:
        if times.mixed_s(rows, context, size - rows if size > rows else BLOCK, depth) <= limit_s:
            break
        size -= _STEP_ROUND if size > 512 else _FINE_ROUND
    return max(size, rows + BLOCK)


def request_s(times: RooflineTimes, workload: Workload, rows: int, step: int) -> float:
    """Seconds of the replica per request, in a batch that stays full: its prompt's share of mixed steps, and its share of
    `answer` decode steps."""
    return prompt_cost_s(times, workload, rows, step) + workload.mean_answer * _decode_s(times, workload, rows) / rows


def _decode_s(times: RooflineTimes, workload: Workload, rows: int) -> float:
    return times.decode_s(rows, workload.held_mean + workload.shared_prefix)


def prompt_cost_s(times: RooflineTimes, workload: Workload, rows: int, step: int) -> float:
    """What an average prompt adds to the steps that carry it. A shared prefix is computed once and costs nothing here."""
    context, shared = workload.held_mean + workload.shared_prefix, workload.shared_prefix
    chunk = max(BLOCK, step - rows)
    own = max(1.0, workload.mean_prompt - shared)
    size = max(1, min(chunk, round(own)))
    added = times.mixed_s(rows, context, size, shared + (own - size) / 2) - times.decode_s(rows, context)
    return max(0.0, added) * own / size


def tpot_s(times: RooflineTimes, workload: Workload, rows: int, step: int) -> float:
    """In a full batch: each of the other rows brings its prompt once per answer."""
    interrupted = (rows - 1) * prompt_cost_s(times, workload, rows, step) / workload.mean_answer
    return _decode_s(times, workload, rows) + interrupted


def _keeps(times: RooflineTimes, workload: Workload, slo: Slo, rows: int, step: int) -> bool:
    if 1e3 * tpot_s(times, workload, rows, step) > _limit_ms(slo, "tpot"):
        return False
    mixed_ms = 1e3 * _mixed_s(times, workload, rows, step)
    if mixed_ms > _limit_ms(slo, "itl"):
        return False
    for bound in slo.bounds:  # a prompt that comes to a full batch, if nothing waits before it
        if bound.metric == "ttft":
            own = workload.prompt_at(bound.percent) - workload.shared_prefix
            if math.ceil(own / max(BLOCK, step - rows)) * mixed_ms > bound.limit_ms:
                return False
    return True


def _mixed_s(times: RooflineTimes, workload: Workload, rows: int, step: int) -> float:
    context = workload.held_mean + workload.shared_prefix
    tokens = min(max(BLOCK, step - rows), workload.prompts[-1])
    return times.mixed_s(rows, context, tokens, workload.prompt_at(95) / 2)


def _described(
    times: RooflineTimes, capacity: Capacity, workload: Workload, slo: Slo, rows: int, step: int, context_length: int
) -> Option:
    floors = {f"p{percent}": _ttft_s(times, workload, workload.prompt_at(percent), step) for percent in (50, 95, 99)}
    settings = Settings(
        max_num_seqs=rows,
        max_num_batched_tokens=step,
        long_prefill_token_threshold=max(BLOCK, step // 2 // BLOCK * BLOCK),
        max_model_len=context_length,
        kv_cache_dtype="fp8" if times.kv.name == "fp8" else "auto",
    )
    option = Option(
        times=times,
        capacity=capacity,
        fits=True,
        why_not="",
        settings=settings,
        decode_one_ms=1e3 * times.decode_s(1, workload.mean_prompt + workload.mean_answer / 2),
        decode_full_ms=1e3 * _decode_s(times, workload, rows),
        mixed_ms=1e3 * _mixed_s(times, workload, rows, step),
        tpot_ms=1e3 * tpot_s(times, workload, rows, step),
        ttft_floor_ms={name: 1e3 * seconds for name, seconds in floors.items()},
        request_s=request_s(times, workload, rows, step),
    )
    return msgspec.structs.replace(option, misses=_misses(option, workload, slo))


def _ttft_s(times: RooflineTimes, workload: Workload, prompt: int, step: int) -> float:
    """Of an idle replica: nothing waits, nothing decodes."""
    own = max(1, prompt - workload.shared_prefix)
    return times.front_s + times.prompt_s(own, step, depth=prompt - own) + times.back_s


def _misses(option: Option, workload: Workload, slo: Slo) -> list[str]:
    """Bounds that cannot hold however few requests there are."""
    assert option.settings is not None
    times, step = option.times, option.settings.max_num_batched_tokens
    misses = []
    for bound in slo.bounds:
        if bound.metric == "ttft":
            floor = 1e3 * _ttft_s(times, workload, workload.prompt_at(bound.percent), step)
        elif bound.metric == "e2el":
            pairs = workload.lengths[:_JUDGED]
            whole = [
                1e3 * _ttft_s(times, workload, prompt, step) + (answer - 1) * option.decode_one_ms
                for prompt, answer in pairs
            ]
            floor = percentile(sorted(whole), bound.percent)
        else:
            floor = option.decode_one_ms
        if floor > bound.limit_ms:
            misses.append(f"{bound}: at least {duration_text(floor)}, with no other request present")
    return misses
