# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""A LoRA adapter inside the product of one row: what `gemv.py` adds to its kernels for W x + B (A x).

Does: `shrink`, by which the first programs of a product's grid compute y = A x; `b_of`, `words_of` and `expanded`, by which
all others add B y to their own sums; and what the two kinds share, `OneRowScratch`. Does not: choose an adapter (a row's slot
is read from device memory), or serve more rows than one.

**How y travels.** Its numbers are words in memory, and a word is EMPTY (a NaN that no arithmetic makes) until its number is
there. A program that needs y reads its words until none is EMPTY. A word is its own flag, so nothing has to be ordered before
anything else: no fence, no counter, one trip to L2 instead of two. y lies there in several copies, so that thousands of
programs do not read one line of L2.

**How words become EMPTY again.** A scratch has four places, one for each kind of product: qkv, o, gate-up and down. A launch
fills its own place, and its first program empties the three others. The rule: *no two launches in a row use the same place*.
Then every launch finds its own place empty, however often a graph is replayed and whatever graphs follow one another:
1. Between launches only the place of the last one is full. It holds at the beginning (all are EMPTY), and each launch keeps it.
2. Programs touch places after `follow()` only. Then the launch ahead has ended and what it wrote is visible, so no program is
   left that reads what is emptied or filled now, although the kernel itself may have begun before.
`gemv` asserts the rule for launches made one after another; across graphs it holds because a step's products come in a layer's
order: after down comes qkv, or o where a step only finishes its last layer. Experts have no adapters, so where the last layer has
them such a step may follow another o, and begins with `clear`.

**Why waiting ends.** Programs start in the order of their numbers, and those that compute y have the lowest: when a program
waits, all of them have started, and what has started is not put off its multiprocessor for a later one. They themselves wait
for nothing but the kernel ahead, in `follow()`. That one has let this kernel begin, which each of its programs does after its own
`follow()`, or by ending: all its programs have started, too. Those that wait there wait for their own first programs, which have
started before them, and so on to the first kernel in the stream. Kernels of other streams only delay a start. No y is EMPTY:
were a sum ever to have these bits, it is written as another NaN.

A slot of -1 makes y zero and reads no A or B: the same kernel, the same waiting, nothing added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tonle.models.cuda.gpu_features import INTERPRETED
from tonle.models.cuda.launch import follow, launch

PLACES = ("qkv", "o", "gate_up", "down")
EMPTY = -8531  # 0xFFFFDEAD: as float32 a NaN, and not the one that arithmetic gives
_COPIES = 8
_EMPTY = tl.constexpr(EMPTY)
_NAN = tl.constexpr(0x7FC00000)
_NUM_PLACES = tl.constexpr(len(PLACES))
_NUM_COPIES = tl.constexpr(_COPIES)


class OneRowScratch:
    """Where y of a product waits for its readers. One serves all layers of a model: its products run one after another."""

    def __init__(self, max_rank: int, device: torch.device) -> None:
        self.rank = max_rank
        self.width = max(32, triton.next_power_of_2(3 * max_rank))  # words of one copy; 32 are a line of L2
        self.words = torch.full((len(PLACES), _COPIES, self.width), EMPTY, dtype=torch.int32, device=device)
        self.last: int | None = None  # place of the last launch

    def take(self, place: int) -> None:
        """Note a launch. Two in a row at one place would let the second take the first one's y for its own."""
        assert place != self.last, f"two products in a row use the place of {PLACES[place]}"
        self.last = place

    def clear(self) -> None:
        """Empty every place. For the o of a last layer with experts: what came before may have been an o, too."""
        self.words.fill_(EMPTY)
        self.last = None


@dataclass(frozen=True, slots=True, eq=False)
class OneRowAdapter:
    """All slots' matrices of one product, and which of them its row uses.

    A product consists of modules (q, k and v; o; gate and up; down), each with A (rank, K) and B (its outputs, rank), where
    rank is the largest allowed: smaller adapters and modules that one leaves out are filled up with zeros.
    """

    slot: torch.Tensor  # (1,) int32, on the device; -1: none
    a: torch.Tensor  # (slots, modules * rank, K), contiguous: the modules' A one after another
    b: torch.Tensor  # (slots, outputs of all modules, rank), contiguous
    sizes: tuple[int, ...]  # outputs of each module
    scratch: OneRowScratch
    place: str  # one of PLACES
    fused: bool = True  # y inside the product's kernel; else by a kernel of its own ahead of it

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class AdapterCut:
    """What a kernel is compiled for: y's shape, where it lies, and how it is cut into programs."""

    programs: int  # that compute y, ahead of the product's own; 0: a kernel ahead has done it
    rows: int  # of A, for each of them: few, for all others wait for them
    block_k: int  # inputs at a time
    ahead: int  # blocks of A that are read before the kernel ahead has ended
    all_rows: int  # of A: modules * rank
    rank: int
    padded_rank: int  # a power of two
    outputs: int  # of all modules
    second: int  # the output with which the second module begins, and the third
    third: int
    place: int
    width: int  # words of one copy of y
    wait: bool  # for words that are EMPTY
    fetch: bool  # ask for B early where it is read late


@triton.jit
def _fill(y, WORDS, j, live, CUT: tl.constexpr):
    """Write numbers j (ROWS,) of y to every copy of the place; the first program empties all other places."""
    bits = y.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _EMPTY, _NAN, bits)[:, None]
    copy = CUT.place * _NUM_COPIES + tl.arange(0, _NUM_COPIES)
    words = WORDS + copy[None, :] * CUT.width + j[:, None]
    some = live[:, None] & (copy >= 0)[None, :]
    tl.atomic_xchg(
        words, tl.where(some, bits, 0), mask=some, sem="relaxed"
    )  # the interpreter wants numbers of their own
    if tl.program_id(0) == 0:
        word = tl.arange(0, _NUM_COPIES * CUT.width)
        nothing = tl.zeros(word.shape, tl.int32) + _EMPTY
        for other in tl.static_range(_NUM_PLACES):
            if other != CUT.place:
                tl.store(WORDS + other * (_NUM_COPIES * CUT.width) + word, nothing)


@triton.jit
def shrink(X, GAIN, A, SLOT, WORDS, K: tl.constexpr, NORM: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):
    """Some of the slot's rows of A, times x (times its norm's gain, without its scale: the readers apply that)."""
    ROWS: tl.constexpr = CUT.rows
    BK: tl.constexpr = CUT.block_k
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = j < CUT.all_rows
    slot = tl.load(SLOT)
    some = live & (slot >= 0)
    k = tl.arange(0, BK)
    own = A + (slot.to(tl.int64) * CUT.all_rows + j)[:, None] * K + k[None, :]  # (ROWS, BK) pointers
    blocks = ()
    for first in tl.static_range(0, CUT.ahead * BK, BK):
        blocks += (tl.load(own + first, mask=some[:, None] & (first + k < K)[None, :], other=0.0),)
    follow(PDL)
    acc = tl.zeros([ROWS, BK], tl.float32)
    for first in tl.static_range(0, K, BK):
        inside = first + k < K
        if first < CUT.ahead * BK:
            a = blocks[first // BK]
        else:
            a = tl.load(own + first, mask=some[:, None] & inside[None, :], other=0.0)
        x = tl.load(X + first + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x *= tl.load(GAIN + first + k, mask=inside, other=0.0).to(tl.float32)
        acc += a.to(tl.float32) * x[None, :]
    _fill(tl.sum(acc, 1), WORDS, j, live, CUT)


@triton.jit
def b_of(B, slot, n, live, CUT: tl.constexpr):
    """Rows n of the slot's B: (BN, padded rank)."""
    r = tl.arange(0, CUT.padded_rank)
    rows = B + (slot.to(tl.int64) * CUT.outputs + n)[:, None] * CUT.rank + r[None, :]
    return tl.load(rows, mask=(live & (slot >= 0))[:, None] & (r < CUT.rank)[None, :], other=0.0)


@triton.jit
def ask_for_b(B, slot, n, live, CUT: tl.constexpr):
    """Let rows n of the slot's B come as far as L2; `b_of` reads them later."""
    if CUT.fetch:
        rows = B + (slot.to(tl.int64) * CUT.outputs + n) * CUT.rank
        rows = tl.where(live & (slot >= 0), rows, B)
        RANK: tl.constexpr = CUT.rank
        for first in tl.static_range(0, RANK, 64):  # 128 bytes, in half precision
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [rows + first], dtype=tl.int32,
                                      is_pure=False, pack=1)  # fmt: skip


@triton.jit
def words_of(WORDS, n, CUT: tl.constexpr):
    """What is there of y (padded rank,) for outputs from n on, which are of one module: numbers as words, or EMPTY."""
    module = (n >= CUT.second).to(tl.int32) + (n >= CUT.third).to(tl.int32)
    copy = CUT.place * _NUM_COPIES + tl.program_id(0) % _NUM_COPIES
    r = tl.arange(0, CUT.padded_rank)
    return tl.load(WORDS + copy * CUT.width + module * CUT.rank + r, mask=r < CUT.rank, other=0, volatile=True)


@triton.jit
def _some_empty(words):
    """Whether a word of any thread is EMPTY: one answer for the whole program.

    Threads hold the same words several times, read at different moments. Were each to believe its own, they would part ways,
    and the next barrier or exchange among them would not end, or mix an EMPTY word in. So each word is asked about by all.
    """
    empty = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.b32 p, $1, 0xFFFFDEAD; bar.red.or.pred p, 0, p; selp.b32 $0, 1, 0, p; }",
        "=r,r",
        [words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.max(empty, 0)


@triton.jit
def expanded(words, b, WORDS, n, CUT: tl.constexpr):
    """B y (BN,) of outputs from n on, by the words as first read, or as read again where some were EMPTY."""
    if CUT.wait:
        while _some_empty(words) != 0:
            words = words_of(WORDS, n, CUT)
    return tl.sum(b.to(tl.float32) * words.to(tl.float32, bitcast=True)[None, :], 1)


@triton.jit
def _shrink_alone(X, GAIN, A, SLOT, WORDS, K: tl.constexpr, NORM: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):
    shrink(X, GAIN, A, SLOT, WORDS, K, NORM, CUT, PDL)


def _ahead(place: str, blocks: int, rows: int) -> int:
    """qkv's programs begin when down's end: reading A first, which waits for the slot, would only put off reading x."""
    return 0 if place == "qkv" else min(blocks, 8 // rows)


def adapter_cut(adapter: OneRowAdapter, inputs: int, warps: int, *, half: bool) -> AdapterCut:
    """How a product's kernel of so many warps brings in an adapter. `half`: weights have 16 bits."""
    never = sum(adapter.sizes)
    begins = [sum(adapter.sizes[:module]) for module in range(1, len(adapter.sizes))]
    second, third = (*begins, never, never)[:2]
    all_rows = adapter.a.shape[1]
    rows = 1 if all_rows <= 64 else 2 if all_rows <= 256 else 4
    block = min(triton.next_power_of_2(inputs), warps * 256)  # 16 bytes of a row for each thread
    return AdapterCut(
        programs=triton.cdiv(all_rows, rows) if adapter.fused else 0,
        rows=rows,
        block_k=block,
        ahead=_ahead(adapter.place, triton.cdiv(inputs, block), rows) if half else 1,  # in registers
        all_rows=all_rows,
        rank=adapter.rank,
        padded_rank=triton.next_power_of_2(adapter.rank),
        outputs=never,
        second=second,
        third=third,
        place=PLACES.index(adapter.place),
        width=adapter.scratch.width,
        wait=adapter.fused and not INTERPRETED,
        fetch=not INTERPRETED,
    )


def adapted_options(share: int) -> dict[str, int]:
    """Compiler options for an unrolled product of which each thread reads `share` weights.

    Left alone, ptxas takes fewer registers than these for qkv and gate-up, and reads a part of W only after another has come;
    for down it takes so many that not all programs fit at once (q1.5b: 3 µs per layer more, 0.4 with 168).
    """
    return {"maxnreg": 168 if share > 96 else 112}


def begin(adapter: OneRowAdapter, x: torch.Tensor, gain: torch.Tensor | None, warps: int) -> AdapterCut:
    """Take the adapter's place for a product that is launched next, and compute its y unless that one does."""
    adapter.scratch.take(PLACES.index(adapter.place))
    half = x.element_size() == 2
    cut = adapter_cut(adapter, x.shape[1], warps, half=half)
    if not adapter.fused:
        alone = replace(adapter_cut(replace(adapter, fused=True), x.shape[1], 2, half=half), wait=False)
        launch(
            _shrink_alone, (alone.programs,),
            x, gain, adapter.a, adapter.slot, adapter.scratch.words, x.shape[1], gain is not None, alone,
            num_warps=2,
        )  # fmt: skip
    return cut
