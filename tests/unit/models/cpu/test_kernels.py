"""Compiled kernels against plain numpy and torch, for every format and awkward sizes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tests.fakes.checkpoints import save_folder, save_gguf
from tonle.engine.text import load_text
from tonle.models.cpu import cpu_decoder
from tonle.models.cpu import open as opening
from tonle.models.cpu.cpu_attention import soften
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.dots import HAS_DOTS, has_dots
from tonle.models.cpu.exponential import exponential
from tonle.models.cpu.layout import layout
from tonle.models.cpu.memory import aligned
from tonle.models.cpu.pack import why_not
from tonle.models.cpu.products import Bytes, Digits, PackedMatrix
from tonle.models.cpu.step import product
from tonle.models.cpu.stored import Stored, from_floats
from tonle.models.cpu.team import Team
from tonle.models.cpu.vector import GROUP, I64, LANES, ROWS, VF, Code, lanes_for
from tonle.models.cpu.workspace import Workspace
from tonle.models.decoder import Decoder
from tonle.models.gguf_file import GGMLType
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.source import ModelSource, resolve

RNG = np.random.default_rng(0)


def stored(kind: str, rows: int, columns: int) -> Stored:
    groups = (rows, columns // GROUP)
    scale = (RNG.random(groups) * 0.02).astype(np.float16).astype(np.float32)
    minimum = (RNG.random(groups) * -0.1).astype(np.float16).astype(np.float32)
    match kind:
        case "q4":
            return Stored(RNG.integers(0, 16, (rows, columns), dtype=np.uint8), scale, minimum)
        case "q4 with float32 scales":
            third = np.float32(1 / 3)
            return Stored(RNG.integers(0, 16, (rows, columns), dtype=np.uint8), scale * third, minimum * third)
        case "q8":
            return Stored(RNG.integers(-127, 128, (rows, columns), dtype=np.int8), scale, np.zeros(groups, np.float32))
        case "bf16":
            values = RNG.standard_normal((rows, columns)).astype(np.float32)
            return from_floats((values.view(np.uint32) & 0xFFFF0000).view(np.float32))
        case _:
            return from_floats(RNG.standard_normal((rows, columns)).astype(np.float32))


KINDS = ["q4", "q4 with float32 scales", "q8", "bf16", "f32"]
needs_dots = pytest.mark.skipif(not HAS_DOTS, reason="this processor has no 8-bit dot product")


def product_error(kind: str, *, dots: bool, rows: int = 200, columns: int = 96) -> float:
    """The worst error, relative to the norm, over awkward numbers of rows; 200 do not fill the last block."""
    made = [stored(kind, rows, columns) for _ in range(2)]
    matrix = layout(made, gated=False, dots=dots)
    team, spec = Team(2), SimpleNamespace(hidden_size=columns)
    packed = SimpleNamespace(experts=None, mlp_after=np.zeros((1, 0)))
    workspace = Workspace(spec, packed, num_threads=2)  # type: ignore[arg-type]
    worst = 0.0
    for count in (1, 2, 3, 4, 5, 7, 16, 33, 100):
        x = RNG.standard_normal((count, columns)).astype(np.float32)
        x[0, :GROUP] = 0
        x[-1, 5] = 300.0  # an outlier, as real activations have
        out = np.empty((count, matrix.weights.shape[1] * ROWS), dtype=np.float32)
        form = workspace.form("x", matrix, count, columns)
        for layer in range(2):
            team.run(lambda member, layer=layer: product(matrix, layer, x, form, out, workspace.scratch, member, 2))  # noqa: B023
            expected = x @ made[layer].floats().T
            errors = np.linalg.norm(out[:, :rows] - expected, axis=1) / np.linalg.norm(expected, axis=1)
            worst = max(worst, float(errors.max()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_float_products_agree_with_dequantized_float32(kind: str) -> None:
    assert product_error(kind, dots=False) < 1e-5


@needs_dots
@pytest.mark.parametrize("kind", KINDS[:3])
def test_integer_products_agree_with_dequantized_float32(kind: str) -> None:
    assert product_error(kind, dots=True) < 1e-4


def multiplied(matrix: PackedMatrix, x: np.ndarray, activation_bits: int) -> tuple[np.ndarray, Bytes | Digits]:
    """x (T, K) times the matrix, and x as it was multiplied."""
    packed = SimpleNamespace(experts=None, mlp_after=np.zeros((1, 0)))
    spec = SimpleNamespace(hidden_size=x.shape[1])
    workspace = Workspace(spec, packed, num_threads=1, activation_bits=activation_bits)  # type: ignore[arg-type]
    form = workspace.form("x", matrix, *x.shape)
    assert isinstance(form, Bytes if activation_bits == 8 else Digits)
    out = np.empty((len(x), matrix.weights.shape[1] * ROWS), dtype=np.float32)
    product(matrix, 0, x, form, out, workspace.scratch, 0, 1)
    return out, form


@needs_dots
@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_a_number_that_stands_out_is_not_rounded_and_does_not_coarsen_the_others(kind: str) -> None:
    weights = stored(kind, 64, 128)
    matrix = layout([weights], gated=False, dots=True)
    x = RNG.standard_normal((5, 128)).astype(np.float32).clip(-2, 2)
    x[1, 40] = -100  # in the second of four groups
    x[3, 96:] = 0
    x[3, 127] = 1e-3
    out, form = multiplied(matrix, x, 8)
    assert isinstance(form, Bytes)
    assert form.which.T.tolist() == [[0] * 4, [0, 9, 0, 0], [0] * 4, [0, 0, 0, 32], [0] * 4]
    assert (form.outlier[1, 1], form.outlier[3, 3]) == (-100, np.float32(1e-3))
    errors = np.abs(out - x @ weights.floats().T).max(axis=1)
    assert errors[1] < 2 * errors[0]  # one byte would be off by half of 100 / 127 in each number
    assert 5 * np.abs(multiplied(matrix, x, 16)[0] - x @ weights.floats().T).max() < errors.min()


@needs_dots
@pytest.mark.parametrize("places", [(3, 5), (3, 20), (17, 31)])
@pytest.mark.parametrize("second", [1.0, -1.0])
def test_of_two_numbers_that_stand_out_alike_both_count(places: tuple[int, int], second: float) -> None:
    weights = stored("q4", 64, 32)
    x = np.full((1, 32), 0.01, np.float32)
    x[0, places] = 1, second
    out, _ = multiplied(layout([weights], gated=False, dots=True), x, 8)
    np.testing.assert_allclose(out, x @ weights.floats().T, atol=0.02)


@needs_dots
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_what_is_not_a_number_stays_so(activation_bits: int) -> None:
    matrix = layout([stored("q4", 64, 64)], gated=False, dots=True)
    for place in (0, 3, 20, 31):
        x = RNG.standard_normal((2, 64)).astype(np.float32)
        x[1, place] = np.nan
        out, _ = multiplied(matrix, x, activation_bits)
        assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@needs_dots
@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_8_bit_products_are_the_same_bits_in_any_company(kind: str) -> None:
    """Rows with outliers beside rows without, in every number that is multiplied together."""
    matrix = layout([stored(kind, 64, 96)], gated=False, dots=True)
    x = RNG.standard_normal((11, 96)).astype(np.float32)
    x[[1, 2, 6, 10], 7] = 50
    alone = np.concatenate([multiplied(matrix, row[None], 8)[0] for row in x])
    for first in range(4):
        for last in range(first + 1, len(x) + 1):
            np.testing.assert_array_equal(multiplied(matrix, x[first:last], 8)[0], alone[first:last])


def test_integer_products_are_used_where_the_processor_has_them() -> None:
    assert has_dots({"avx512vnni": True}) and has_dots({"avxvnni": True, "avx2": True})
    assert not has_dots({"avx2": True, "avx512f": True}) and not has_dots({})
    assert layout([stored("q4", 64, 64)], gated=False, dots=True).weights.ndim == 5
    assert layout([stored("bf16", 64, 64)], gated=False, dots=True).weights.ndim == 4


@intrinsic
def _exp_vector(typingctx: Any, values: Any, v: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        numbers, first = code.pointer(0), ir.Constant(I64, 0)
        code.store(exponential(code, code.load(numbers, first, VF)), numbers, first)
        return context.get_dummy_value()

    return types.void(values, v), generate


@njit
def _exp(values: np.ndarray) -> None:
    for first in range(0, values.shape[0], LANES):
        _exp_vector(values, first)


@njit
def _soften(scores: np.ndarray, count: int) -> float:
    return soften(scores, 0, count)


def test_exp_to_float32_precision() -> None:
    values = np.concatenate((np.linspace(-86, 80, 5118), [0.0, -200.0])).astype(np.float32)
    ours = values.copy()
    _exp(ours)
    np.testing.assert_allclose(ours[:-1], np.exp(values[:-1].astype(np.float64)), rtol=3e-7)
    assert 0 <= ours[-1] < 1e-37


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_softmax_of_any_length(count: int) -> None:
    scores = RNG.standard_normal(112).astype(np.float32) * 30
    expected = np.exp(scores[:count].astype(np.float64) - scores[:count].max())
    total = _soften(scores, count)
    np.testing.assert_allclose(scores[:count], expected, rtol=1e-5, atol=1e-30)
    assert total == pytest.approx(expected.sum(), rel=1e-5)


def test_a_team_reports_what_went_wrong_in_a_helper() -> None:
    team = Team(3)

    def work(member: int) -> None:
        if member == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        team.run(work)
    seen: list[int] = []
    team.run(seen.append)
    assert sorted(seen) == [0, 1, 2]


def test_a_team_that_is_freed_takes_its_threads_and_its_work_along() -> None:
    team = Team(3)

    def work_on_weights(team: Team) -> weakref.ref[Any]:
        weights = RNG.standard_normal(3)
        team.run(lambda member: weights.item(member))
        return weakref.ref(weights)

    assert work_on_weights(team)() is None  # a sleeping helper keeps nothing of the work
    helpers = [each for each in threading.enumerate() if getattr(each, "_target", None) == team._orders.help]
    assert len(helpers) == 2
    del team
    for helper in helpers:
        helper.join(timeout=60)
    assert not any(helper.is_alive() for helper in helpers)


def test_vectors_are_as_wide_as_the_processor_has() -> None:
    assert lanes_for({"avx512f": True, "avx2": True}) == 16
    assert lanes_for({"avx512f": False, "avx2": True}) == 8
    assert lanes_for({}) == 8  # ARM, old x86: LLVM splits them


def test_buffers_do_not_pile_up_while_steps_grow() -> None:
    matrix = layout([stored("q4", 64, 64)], gated=False, dots=False)
    packed = SimpleNamespace(qkv=matrix, o=matrix, gate_up=matrix, down=matrix, head=matrix, mlp_after=np.zeros((1, 0)),
                             experts=None)  # fmt: skip
    spec = SimpleNamespace(hidden_size=64, intermediate_size=64, q_size=64, num_heads=1, head_dim=64)
    workspace = Workspace(spec, packed, num_threads=1)  # type: ignore[arg-type]
    for count in range(1, 200):
        workspace.cut(count, 64)
    alive = {id(cut.hidden.base) for cut in workspace._cut.values()}
    assert alive == {id(workspace.cut(1, 64).hidden.base)}


def test_buffers_start_at_a_cache_line() -> None:
    assert aligned((3, 5), np.dtype(np.float32)).ctypes.data % 64 == 0


# -- whole models


FORMS = [(form, family) for form in ("folder", "gguf") for family in ("llama", "qwen2", "qwen3", "mistral")]
FORMS.remove(("gguf", "mistral"))  # which is a llama there


@pytest.mark.parametrize(("form", "family"), FORMS)
def test_a_fast_step_equals_a_slow_one(family: str, form: str, tmp_path: Path) -> None:
    """Mixed rows: decoding, a first chunk, a chunk on top of cached tokens."""
    if form == "folder":
        save_folder(family, tmp_path / "m")
        source = ModelSource("folder", tmp_path / "m", "m")
    else:
        save_gguf(family, tmp_path / "m.gguf", quant=GGMLType.Q8_0)
        source = resolve(tmp_path / "m.gguf")
    decoder = _open(source)
    _compare(decoder, vocab=decoder.spec.vocab_size)


@pytest.mark.model
def test_the_default_model(default_model: ModelSource) -> None:
    decoder = _open(default_model)
    assert decoder.formats() == ["4-bit", "8-bit"]
    _compare(decoder, vocab=decoder.spec.vocab_size)


def _open(source: ModelSource) -> CpuDecoder:
    decoder = opening.open_cpu(source)
    assert isinstance(decoder, CpuDecoder)
    decoder._slow = decoder._slow or opening.load(source, device=torch.device("cpu"))
    return decoder


SPANS = [(37, 38), (0, 1), (0, 21), (50, 63)]  # two rows decode, one starts, one goes on


def _step(spans: list[tuple[int, int]], vocab: int) -> StepInputs:
    tables = torch.arange(40, dtype=torch.int32).view(4, 10)
    positions = torch.cat([torch.arange(a, b) for a, b in spans])
    sizes = torch.tensor([b - a for a, b in spans])
    row_of = torch.repeat_interleave(torch.arange(4), sizes)
    ends = sizes.cumsum(0)
    return StepInputs(
        tokens=torch.randint(0, vocab, (len(positions),)), positions=positions,
        slots=tables[row_of, positions // 16].long() * 16 + positions % 16, row_starts=[0, *ends.tolist()],
        context_lens=[b for _, b in spans], block_tables=tables[:, :4].contiguous(), num_decode=0, logit_indices=ends - 1,
    )  # fmt: skip


@torch.inference_mode()
def _compare(decoder: CpuDecoder, vocab: int) -> None:
    slow_decoder = decoder._slow  # dropped when kernels that are compiled meanwhile are ready
    assert isinstance(slow_decoder, Decoder)
    spec = decoder.spec
    torch.manual_seed(0)
    caches = [
        KVCache(num_layers=spec.num_layers, num_blocks=40, block_size=16, num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))
        for _ in range(2)
    ]  # fmt: skip
    slow_decoder.forward(_step([(0, max(a, 1)) for a, _ in SPANS], vocab), caches[0])  # what is cached already
    caches[1].k.copy_(caches[0].k)
    caches[1].v.copy_(caches[0].v)
    inputs = _step(SPANS, vocab)
    slow = slow_decoder.forward(inputs, caches[0])
    fast = decoder._fast(inputs, caches[1])
    assert float((fast - slow).norm() / slow.norm()) < 1e-3
    assert torch.equal(fast.argmax(-1), slow.argmax(-1))
    assert float((caches[1].k - caches[0].k).norm() / caches[0].k.norm()) < 1e-3
    assert float((caches[1].v - caches[0].v).norm() / caches[0].v.norm()) < 1e-3
    inputs.logit_indices = torch.cat(
        [inputs.logit_indices, torch.arange(4, 24)]
    )  # described too: twice, and out of order
    slow = slow_decoder.forward(inputs, caches[0])
    fast = decoder._fast(inputs, caches[1])
    assert float((fast - slow).norm() / slow.norm()) < 1e-3
    inputs.logit_indices = torch.arange(0)  # a part of a prompt: keys and values are all there is to do
    caches[1].k.zero_()
    assert decoder._fast(inputs, caches[1]).shape == (0, vocab)
    assert float((caches[1].k[-1] != 0).float().sum()) == len(inputs.tokens) * spec.kv_size


def test_without_numba_everything_runs_through_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder("llama", tmp_path / "m")
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: None)
    assert isinstance(opening.open_cpu(ModelSource("folder", tmp_path / "m", "m")), Decoder)


def test_a_model_the_kernels_do_not_fit_runs_through_torch(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "m", hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    source = ModelSource("folder", tmp_path / "m", "m")
    decoder = opening.open_cpu(source)
    assert isinstance(decoder, Decoder)
    assert why_not(decoder.spec) is not None


def test_a_model_too_large_to_hold_twice_has_no_slow_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder("llama", tmp_path / "m")
    source = ModelSource("folder", tmp_path / "m", "m")
    monkeypatch.setattr(opening, "_memory_bytes", lambda: 1)
    alone = opening.open_cpu(source)
    assert isinstance(alone, CpuDecoder) and alone._slow is None and alone.crossover > 10**6
    tokens = torch.randint(0, alone.spec.vocab_size, (5,))
    rows = np.empty((5, alone.spec.hidden_size), np.float32)
    alone._embed(tokens, rows)
    embedding = opening.load(source, device=torch.device("cpu")).weights.embedding
    np.testing.assert_array_equal(rows, embedding[tokens].numpy())


def test_a_decoder_can_be_freed_while_its_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(cpu_decoder, "is_warm", lambda types: False)
    monkeypatch.setattr(cpu_decoder, "warm_later", lambda types, done: waiting.append(done))
    monkeypatch.setattr(CpuDecoder, "_measure", lambda self: 7)
    save_folder("llama", tmp_path / "m")
    kept, freed = (opening.open_cpu(ModelSource("folder", tmp_path / "m", "m")) for _ in range(2))
    reference = weakref.ref(freed)
    del freed
    gc.collect()
    assert reference() is None
    for done in waiting:
        done()
    assert isinstance(kept, CpuDecoder) and kept.crossover > 0


@pytest.mark.model
@torch.inference_mode()
def test_perplexity_is_the_same_to_half_a_percent(default_model: ModelSource) -> None:
    """On a text we ship, teacher-forced, through packed weights and through float32."""
    text = (Path(__file__).parents[4] / "docs" / "architecture.md").read_text()
    tokens = torch.tensor(load_text(default_model).encode(text)[:192])
    decoder = _open(default_model)
    assert decoder._slow is not None
    losses = []
    for forward in (decoder._fast, decoder._slow.forward):
        spec = decoder.spec
        kv = KVCache(num_layers=spec.num_layers, num_blocks=12, block_size=16, num_kv_heads=spec.num_kv_heads,
                     head_dim=spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))  # fmt: skip
        places = torch.arange(len(tokens))
        inputs = StepInputs(
            tokens=tokens, positions=places, slots=places, row_starts=[0, len(tokens)], context_lens=[len(tokens)],
            block_tables=torch.arange(12, dtype=torch.int32)[None], num_decode=0, logit_indices=places,
        )  # fmt: skip
        losses.append(torch.nn.functional.cross_entropy(forward(inputs, kv)[:-1], tokens[1:]).exp().item())
    assert abs(losses[0] / losses[1] - 1) < 0.005
