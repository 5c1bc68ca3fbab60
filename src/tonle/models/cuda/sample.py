# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,attr-defined"
"""One token per row from logits, on the device, without a sort: the same choices as `engine/sample/draw.py`.

Two kernels. `_survey` cuts every row into stretches and leaves each one's best and its sum of exponentials. `_choose`
joins them; a greedy row is done then. Otherwise filters become a threshold, found by halving the interval between the
bit patterns of 0 and 1, and the draw walks the vocabulary in its own order with one uniform number from (seed, position).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.launch import follow, launch

_STRETCHES = 32
_BLOCK = 4096


class RowSettings:
    """What rows ask of sampling, on the device. temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = off."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.temperature = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(max_rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(max_rows, dtype=torch.int64, device=device)


class SampleScratch:
    def __init__(self, max_samples: int, device: torch.device) -> None:
        shape = (max_samples, _STRETCHES)
        self.best = torch.zeros(shape, dtype=torch.float32, device=device)
        self.place = torch.zeros(shape, dtype=torch.int32, device=device)
        self.total = torch.zeros(shape, dtype=torch.float32, device=device)


@triton.jit
def _survey(COUNT, ROWS, LOGITS, TEMPERATURE, BEST, PLACE, TOTAL, V: tl.constexpr, BLOCK: tl.constexpr,
            STRETCHES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0)
    part = tl.program_id(1)
    if s < tl.load(COUNT):
        temperature = tl.load(TEMPERATURE + tl.load(ROWS + s))
        LOGITS += s.to(tl.int64) * V
        per: tl.constexpr = (V + STRETCHES * BLOCK - 1) // (STRETCHES * BLOCK) * BLOCK
        i = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        place = tl.zeros([BLOCK], tl.int32)
        for first in range(part * per, tl.minimum(part * per + per, V), BLOCK):
            x = tl.load(LOGITS + first + i, mask=first + i < V, other=float("-inf")).to(tl.float32)
            place = tl.where(x > best, first + i, place)
            best = tl.maximum(best, x)
        top = tl.max(best, 0)
        place = tl.min(tl.where(best == top, place, V), 0)  # the lowest of equals
        total = 0.0
        if (temperature > 0) & (top > float("-inf")):
            for first in range(part * per, tl.minimum(part * per + per, V), BLOCK):
                x = tl.load(LOGITS + first + i, mask=first + i < V, other=float("-inf")).to(tl.float32)
                total += tl.sum(tl.exp((x - top) / temperature), 0)
        tl.store(BEST + s * STRETCHES + part, top)
        tl.store(PLACE + s * STRETCHES + part, place)
        tl.store(TOTAL + s * STRETCHES + part, total)


@triton.jit
def _mix(x):
    """splitmix64's finalizer, as in `engine/sample/noise.py`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """In [0, 1), with 53 random bits, as float64."""
    bits = _mix(_mix(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weigh(LOGITS, top, temperature, floor, i, V: tl.constexpr):
    """exp((logit - top) / temperature) of tokens i, 0 below the floor: probabilities up to a factor."""
    x = tl.load(LOGITS + i, mask=i < V, other=float("-inf")).to(tl.float32)
    e = tl.exp((x - top) / temperature)
    return tl.where(e >= floor, e, 0.0)


@triton.jit
def _kept(LOGITS, top, temperature, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens reach the floor, and their weight."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        e = _weigh(LOGITS, top, temperature, floor, first + i, V)
        count += (e > 0).to(tl.int32)
        weight += e
    return tl.sum(count, 0), tl.sum(weight.to(tl.float64), 0)


@triton.jit
def _floor(LOGITS, top, temperature, total, top_k, top_p, min_p, V: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest weight that is kept: at most top_k tokens, then as few as reach top_p of what those weigh."""
    floor = 0.0
    whole = total.to(tl.float64)
    if top_k > 0:
        low = 0  # bits of a floor that top_k tokens reach
        high = 0x3F800001  # one past the bits of 1.0, which the best token has
        while high - low > 1:
            middle = (low + high) // 2
            count, weight = _kept(LOGITS, top, temperature, middle.to(tl.float32, bitcast=True), V, BLOCK)
            if count >= top_k:
                low = middle
            else:
                high = middle
        floor = low.to(tl.float32, bitcast=True)
        count, whole = _kept(LOGITS, top, temperature, floor, V, BLOCK)
    if top_p < 1:
        # The lowest floor above which less than top_p lies. "Above" is "from the next bit pattern on".
        low = floor.to(tl.int32, bitcast=True) - 1  # too low, or below all
        high = 0x3F800000  # nothing weighs more than 1.0
        while high - low > 1:
            middle = (low + high) // 2
            above = (middle + 1).to(tl.float32, bitcast=True)
            count, weight = _kept(LOGITS, top, temperature, above, V, BLOCK)
            if weight < top_p * whole:
                high = middle
            else:
                low = middle
        floor = tl.maximum(floor, high.to(tl.float32, bitcast=True))
    return tl.maximum(floor, min_p)


@triton.jit
def _draw(LOGITS, top, temperature, floor, noise, fallback, V: tl.constexpr, BLOCK: tl.constexpr):
    """The first token at which the running weight passes noise * all of it."""
    _, whole = _kept(LOGITS, top, temperature, floor, V, BLOCK)
    target = noise * whole
    i = tl.arange(0, BLOCK)
    token = fallback
    before = whole * 0.0  # float64
    for first in range(0, V, BLOCK):
        e = _weigh(LOGITS, top, temperature, floor, first + i, V).to(tl.float64)
        after = before + tl.sum(e, 0)
        if (before <= target) & (target < after):
            running = before + tl.cumsum(e, 0)
            reached = tl.min(tl.where((running > target) & (e > 0), first + i, V), 0)
            token = tl.where(reached < V, reached, token)
        before = after
    return token


@triton.jit
def _choose(COUNT, ROWS, POSITIONS, LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, BEST, PLACE, TOTAL, OUT, LAST,
            V: tl.constexpr, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0)
    if s < tl.load(COUNT):
        row = tl.load(ROWS + s)
        part = tl.arange(0, STRETCHES)
        best = tl.load(BEST + s * STRETCHES + part)
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, tl.load(PLACE + s * STRETCHES + part), V), 0)
        token = tl.minimum(token, V - 1)  # a row without one number that compares
        temperature = tl.load(TEMPERATURE + row)
        if temperature > 0:
            LOGITS += s.to(tl.int64) * V
            total = tl.sum(tl.load(TOTAL + s * STRETCHES + part) * tl.exp((best - top) / temperature), 0)
            top_k = tl.load(TOP_K + row)
            top_p = tl.load(TOP_P + row)
            min_p = tl.load(MIN_P + row)
            floor = _floor(LOGITS, top, temperature, total, top_k, top_p, min_p, V, BLOCK)
            noise = _uniform(tl.load(SEED + row), tl.load(POSITIONS + s).to(tl.int64))
            token = _draw(LOGITS, top, temperature, floor, noise, token, V, BLOCK)
        tl.store(OUT + s, token)
        tl.store(LAST + row, token)


def sample(
    count: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    settings: RowSettings,
    scratch: SampleScratch,
    out: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Of the S rows of logits (S, V), the first `count[0]` are real: out[s] and last[rows[s]] = the token.

    rows, positions, out, last: int32; `positions[s]` is the place the token will take.
    """
    samples, vocab = logits.shape
    launch(
        _survey, (samples, _STRETCHES),
        count, rows, logits, settings.temperature, scratch.best, scratch.place, scratch.total, vocab, _BLOCK,
        _STRETCHES, num_warps=8,
    )  # fmt: skip
    launch(
        _choose, (samples,),
        count, rows, positions, logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p,
        settings.seed, scratch.best, scratch.place, scratch.total, out, last, vocab, _BLOCK, _STRETCHES,
        num_warps=8,
    )  # fmt: skip
