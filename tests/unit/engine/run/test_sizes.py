"""128k contexts: what is kept per row, how steps are cut, and that nothing grows with rows times positions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from benchmarks.workload import SHAPES, write_config

from tonle.config.engine import EngineConfig
from tonle.engine.machine import block_bytes, kv_cache
from tonle.engine.plan import Plan
from tonle.engine.run.batch_rows import Rows
from tonle.engine.run.packing import RING, Packer
from tonle.models.cuda.batch import Count, Sizes, StepBuffer
from tonle.models.cuda.decode_tiling import max_items, stretch_tokens
from tonle.models.read_spec import read_spec
from tonle.models.rope import Rotary
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

LONG = 131072
BLOCK = 16
ROWS, TOKENS = 256, 4096  # the defaults on a GPU
MIB = 2**20


def spec_of(name: str, folder: object, **changes: object) -> ModelSpec:
    SHAPES[f"{name}-changed"] = {**SHAPES[name], **changes}
    try:
        return read_spec(ModelSource("folder", write_config(f"{name}-changed", folder), name))  # type: ignore[arg-type]
    finally:
        del SHAPES[f"{name}-changed"]


def sizes(kv_heads: int) -> Sizes:
    return Sizes(ROWS, TOKENS, 1024, max_items(ROWS, kv_heads))


class Shape:
    """What sizes a cache."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.device = torch.device("cpu")


def packer(kv_heads: int = 2) -> Packer:
    return Packer(sizes(kv_heads), -(-LONG // BLOCK) + 1, BLOCK, kv_heads, pinned=False)


def plan(rows: list[int], starts: list[int], chunks: list[list[int] | None], new_blocks: object = ()) -> Plan:
    made = Plan()
    made.rows, made.starts, made.chunks = rows, starts, chunks
    made.samples = [True] * len(rows)
    made.new_blocks = list(new_blocks)  # type: ignore[call-overload]
    return made


def test_tables_of_all_rows_take_megabytes() -> None:
    assert packer().tables.nbytes == ROWS * (LONG // BLOCK + 1) * 4 < 9 * MIB
    assert Rows(32, -(-LONG // BLOCK) + 1, BLOCK, torch.device("cpu"))._tables.nbytes < 2 * MIB


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_a_steps_buffer_does_not_know_the_context(kv_heads: int) -> None:
    buffer = StepBuffer(sizes(kv_heads))
    assert buffer.all.nbytes < 128 * 1024  # copied in every step
    assert RING * buffer.all.nbytes < MIB


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 32, 33, 256])
def test_stretches_fit_their_buffers_however_long_and_uneven_the_contexts(rows: int, kv_heads: int) -> None:
    rng = random.Random(rows)
    cases = [[LONG] * rows, [1] * rows, [LONG, *[1] * (rows - 1)],
             *([int(LONG ** rng.random()) for _ in range(rows)] for _ in range(20))]  # fmt: skip
    for contexts in cases:
        stretches = stretch_tokens(np.array(contexts), kv_heads)
        num_items = int((-(-np.array(contexts) // stretches)).sum())
        assert not (stretches % 32).any() and num_items <= max_items(rows, kv_heads) <= max_items(ROWS, kv_heads)


def test_rows_are_cut_evenly_or_not_at_all() -> None:
    """100 rows and 8 heads: 800 programs as they are, and a quarter more would be joined with the rest for nothing."""
    assert set(stretch_tokens(np.full(100, 401), 8).tolist()) == {416}
    assert set(stretch_tokens(np.full(256, 901), 2).tolist()) == {480}  # two pieces, not 448, 448 and 5
    assert stretch_tokens(np.array([100] * 99 + [9000]), 8).tolist() == [128] * 99 + [160]  # the long one in many


def test_few_rows_are_cut_no_finer_than_joining_them_is_worth() -> None:
    def pieces(context: int, kv_heads: int) -> int:
        (stretch,) = stretch_tokens(np.array([context]), kv_heads).tolist()
        return -(-context // stretch)

    assert [pieces(context, 2) for context in (40, 64, 65, 400)] == [1, 1, 2, 7]  # in 64s
    assert pieces(600, 2) <= 8 < 600 / 64  # eight are joined at once: ten would take a round more
    assert pieces(3000, 2) <= 24 < 3000 / 64
    assert pieces(LONG, 2) > 100  # reading is what takes long


def test_a_decode_step_of_long_rows_is_packed_exactly() -> None:
    office = packer()
    rows, starts = list(range(ROWS)), [LONG - 1 - row for row in range(ROWS)]
    packed = office.pack(plan(rows, starts, [None] * ROWS))
    counts = packed.buffer.host("counts")
    stretches, num_items = packed.buffer.host("row_stretches")[:ROWS], int(counts[Count.ITEMS])
    pieces = [-(-(start + 1) // int(stretch)) for start, stretch in zip(starts, stretches, strict=True)]
    assert num_items == sum(pieces) <= max_items(ROWS, 2)
    owners = packed.buffer.host("item_rows")[:num_items]
    assert np.array_equal(np.bincount(owners, minlength=ROWS), pieces)
    assert np.array_equal(packed.buffer.host("sample_positions")[:ROWS], np.array(starts) + 1)
    assert packed.size < TOKENS, "tokens, positions and slots are not sent"


def test_the_last_chunk_of_a_long_prompt_finds_its_slots() -> None:
    office = packer()
    num_blocks = LONG // BLOCK
    blocks = [4_000_000 // BLOCK - place for place in range(num_blocks)]  # of a pool of 4 million tokens
    start = LONG - TOKENS
    packed = office.pack(plan([ROWS - 1], [start], [list(range(TOKENS))], [(ROWS - 1, 0, blocks)]))
    assert packed.long_rows == [ROWS - 1], "more new blocks than travel with a step: the row goes by itself"
    assert packed.num_tiles == TOKENS // 64
    positions, slots = packed.buffer.host("positions"), packed.buffer.host("slots")
    assert (positions[0], positions[TOKENS - 1]) == (start, LONG - 1)
    wanted = [blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(start, LONG)]
    assert slots[:TOKENS].tolist() == wanted


def test_places_in_tables_and_caches_fit_32_bits() -> None:
    width = LONG // BLOCK + 1
    assert ROWS * width < 2**31
    smallest_token_bytes = 2 * 16 * 2 * 64  # 16 layers, 2 heads of 64, fp8: smaller than any model served so far
    assert 141 * 2**30 // smallest_token_bytes < 2**31, "slots of a cache that fills an H200"


def test_angles_take_one_row_per_position(tmp_path: object) -> None:
    spec = spec_of("llama-3.2-3b", tmp_path)
    assert spec.max_positions == LONG and spec.ropes[0].kind == "llama3"
    assert LONG * 2 * spec.head_dim * 2 == 64 * MIB  # bfloat16 cos and sin: `angle_table`
    rotary = Rotary(spec.ropes[0], spec.head_dim, torch.device("cpu"))
    cos, sin = rotary.angles(torch.tensor([0, LONG - 1]), torch.float32)
    assert cos.shape == (2, 1, spec.head_dim) and torch.isfinite(cos).all() and torch.isfinite(sin).all()
    assert torch.allclose(cos[1] ** 2 + sin[1] ** 2, torch.ones(()), atol=1e-5)


def test_llama3_leaves_short_waves_and_stretches_long_ones(tmp_path: object) -> None:
    spec = spec_of("llama-3.2-3b", tmp_path)
    plain = spec_of("llama-3.2-3b", tmp_path, rope_scaling=None)
    turn = torch.tensor([1])

    def radians(of: ModelSpec) -> torch.Tensor:
        cos, sin = Rotary(of.ropes[0], of.head_dim, torch.device("cpu")).angles(turn, torch.float64)
        half = of.head_dim // 2
        return torch.atan2(sin[0, 0, half:], cos[0, 0, half:])

    ratio = radians(plain) / radians(spec)
    assert ratio[0] == pytest.approx(1, rel=1e-5), "the fastest pair"
    assert ratio[-1] == pytest.approx(32, rel=1e-2), "the slowest, by the factor"


def test_yarn_gives_qwen_its_long_context(tmp_path: object) -> None:
    stretched = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    spec = spec_of("qwen2.5-1.5b", tmp_path, **stretched)
    assert spec.max_positions == LONG, "though config.json still says 32768"
    assert spec.ropes[0].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert spec_of("qwen2.5-1.5b", tmp_path).max_positions == 32768


@pytest.mark.parametrize(("name", "gib"), [("qwen2.5-1.5b", 3.5), ("llama-3.2-3b", 14.0)])
def test_what_one_long_request_needs(name: str, gib: float, tmp_path: object) -> None:
    """Keys and values of 131,072 tokens in bfloat16; in fp8 half of it, and 4 bytes per head and token."""
    shape, config = Shape(spec_of(name, tmp_path)), EngineConfig(max_sequence_length=None, block_size=BLOCK)
    assert LONG // BLOCK * block_bytes(shape, config, torch.bfloat16) == gib * 2**30
    assert block_bytes(shape, config, torch.float8_e4m3fn) * 256 == block_bytes(shape, config, torch.bfloat16) * 132


def test_a_cache_too_small_for_the_context_limits_requests_instead_of_failing(tmp_path: object) -> None:
    shape, config = Shape(spec_of("llama-3.2-3b", tmp_path)), EngineConfig(max_sequence_length=None)
    per_block = block_bytes(shape, config, torch.float32)
    kv, context_length = kv_cache(shape, config, 20 * per_block, torch.float32)
    assert (kv.num_blocks, context_length) == (20, 20 * config.block_size)
