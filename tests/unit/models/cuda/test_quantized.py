"""Products with few-bit weights against float32 of the unpacked ones: every form, every way, every fusion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.few_bits import FORMS, few_bits
from tonle.models.cuda import gpu_features, quantized_matrix
from tonle.models.cuda.few_bits import table_words
from tonle.models.cuda.fp8_product import Fp8Scratch, Fp8Tiling, fp8_product, fp8_rows, fp8_tiling
from tonle.models.cuda.matrix import Matrix, Norm, share_scratch
from tonle.models.cuda.quantized_dot import DotTiling, quantized_dot
from tonle.models.cuda.quantized_gemv import QuantizedTiling, quantized_gemv
from tonle.models.cuda.quantized_matrix import QuantizedMatrix, matrix_of, row_switches, share_room
from tonle.models.cuda.skinny import SplitScratch
from tonle.models.cuda.unpack import unpack
from tonle.models.layers import Linear, LinearPart
from tonle.models.packed import Packed, pack

pytestmark = pytest.mark.crossed

CPU = torch.device("cpu")
EPS = 1e-5
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
every_form = pytest.mark.parametrize("form", FORMS)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def packed_of(form: str, outputs: int, inputs: int) -> Packed:
    packed = pack(few_bits(form, outputs, inputs))
    assert packed is not None
    return packed


def matrix_in(form: str, outputs: int, inputs: int, *, bias: bool = False) -> QuantizedMatrix:
    made = matrix_of(
        Linear(LinearPart(few_bits(form, outputs, inputs), numbers(outputs) if bias else None)), torch.float32
    )
    assert isinstance(made, QuantizedMatrix)
    share_scratch([made], CPU)
    share_room([made], 64, torch.zeros(1))
    return made


def norm_of(inputs: int) -> Norm:
    return Norm(numbers(inputs).abs() + 0.5, EPS, torch.full((64, inputs), torch.nan))


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(x, x.shape[1:], norm.gain, norm.eps)


TILINGS = [QuantizedTiling(8, 4, warps=1), QuantizedTiling(4, 1, warps=1, ahead=2)]


@every_form
def test_one_row_with_norm_bias_and_gate(form: str) -> None:
    inputs = 640  # 4-bit blocks have 256
    packed, norm, bias = packed_of(form, 2 * 7, inputs), norm_of(inputs), numbers(14)
    x = numbers(1, inputs)
    gate, up = linear(normed(x, norm), packed.unpacked(torch.float32), bias).chunk(2, dim=-1)
    for tiling in TILINGS:
        out = torch.full((1, 7), torch.nan)
        quantized_gemv(x, packed, out, table=table_words(packed, torch.float32), gain=norm.gain, eps=EPS, bias=bias, glu=1,
                       tiling=tiling)  # fmt: skip
        torch.testing.assert_close(out, silu(gate) * up, **CLOSE)


@pytest.mark.parametrize("form", ["int4", "int8 with minimums", "fp8"])
def test_one_row_added(form: str) -> None:
    packed, x, out = packed_of(form, 7, 512), numbers(1, 512), numbers(1, 7)
    expected = out + linear(x, packed.unpacked(torch.float32))
    for tiling in (None, TILINGS[0]):
        got = quantized_gemv(x, packed, out.clone(), table=table_words(packed, torch.float32), add=True, settled=True,
                             tiling=tiling)  # fmt: skip
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("form", ["int4 per output", "int8", "fp8"])
def test_one_row_of_inputs_that_end_within_a_block(form: str) -> None:
    packed, x = packed_of(form, 12, 72), numbers(1, 72)
    out = quantized_gemv(x, packed, torch.full((1, 12), torch.nan))
    torch.testing.assert_close(out, linear(x, packed.unpacked(torch.float32)), **CLOSE)


@every_form
@pytest.mark.parametrize(("rows", "split"), [(16, 2), (21, 1)])
def test_rows_added(form: str, rows: int, split: int) -> None:
    packed, x, wide = packed_of(form, 40, 640), numbers(rows, 640), numbers(rows, 50)
    tiling = DotTiling(32, 16, stages=2, split=split)
    scratch = SplitScratch([(40, tiling)], CPU)
    scratch.parts.fill_(torch.nan)
    bias = numbers(40)
    expected = wide.clone()
    expected[:, :40] += linear(x, packed.unpacked(torch.float32), bias)
    quantized_dot(x, packed, wide[:, :40], table=table_words(packed, torch.float32), bias=bias, add=True, tiling=tiling,
                  scratch=scratch)  # fmt: skip
    torch.testing.assert_close(wide, expected, **CLOSE)
    assert not scratch.arrived.any()


@every_form
def test_rows_gated(form: str) -> None:
    packed, x, bias = packed_of(form, 2 * 40, 384), numbers(5, 384), numbers(80)
    gate, up = linear(x, packed.unpacked(torch.float32), bias).chunk(2, dim=-1)
    out = torch.full((5, 40), torch.nan)
    quantized_dot(
        x, packed, out, table=table_words(packed, torch.float32), bias=bias, glu=1, tiling=DotTiling(32, 16, 2)
    )
    torch.testing.assert_close(out, silu(gate) * up, **CLOSE)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rows_in_eight_bits(with_norm: bool) -> None:
    """A number of e4m3 is off by a sixteenth at most, or by half of the least step of its row."""
    norm, x = norm_of(200), numbers(7, 200) * torch.logspace(-3, 3, 7)[:, None]
    rows, scale = torch.empty(7, 256, dtype=torch.float8_e4m3fn), torch.empty(7)
    if with_norm:
        fp8_rows(x, rows, scale, gain=norm.gain, eps=EPS)
    else:
        fp8_rows(x, rows, scale)
    natural = rows.float().view(7, 2, 32, 4).transpose(2, 3).reshape(7, 256) * scale[:, None]
    expected = normed(x, norm) if with_norm else x
    assert not natural[:, 200:].any()
    off = (natural[:, :200] - expected).abs()
    assert bool((off <= expected.abs() / 16 + expected.abs().amax(1, keepdim=True) / 2**15).all())


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("add", "bias"), [(False, True), (True, False)])
def test_rows_in_eight_bits_multiplied(add: bool, bias: bool, split: int) -> None:
    """Twice, since programs that share a tile must leave their counters as they were; a third part has no inputs left."""
    packed, x, own_bias = packed_of("fp8", 40, 256), numbers(21, 256), numbers(40) if bias else None
    rows, scale = torch.empty(21, 256, dtype=torch.float8_e4m3fn), torch.empty(21)
    fp8_rows(x, rows, scale)
    rounded = rows.float().view(21, 2, 32, 4).transpose(2, 3).reshape(21, 256) * scale[:, None]
    scratch = Fp8Scratch([], 0, torch.device("cpu"))
    scratch.parts, scratch.arrived = torch.full((4 * split * 32 * 16,), torch.nan), torch.zeros(4, dtype=torch.int32)
    for _ in range(2):
        out = numbers(21, 50) if add else torch.full((21, 50), torch.nan)
        expected = linear(rounded, packed.unpacked(torch.float32), own_bias) + (out[:, :40] if add else 0)
        tiling = Fp8Tiling(32, 16, 2, split=split)
        fp8_product(rows, scale, packed, out[:, :40], bias=own_bias, add=add, tiling=tiling, scratch=scratch)
        torch.testing.assert_close(out[:, :40], expected, **CLOSE)


@every_form
def test_unpacked_to_memory(form: str) -> None:
    packed = packed_of(form, 21, 640)
    memory = torch.full((10 * 640 + 3,), torch.nan)
    got = unpack(packed, memory, slice(5, 15), table_words(packed, torch.float32))
    torch.testing.assert_close(got, packed.unpacked(torch.float32)[5:15], rtol=1e-5, atol=1e-6)
    assert bool(memory[10 * 640 :].isnan().all())


each_way = pytest.mark.parametrize("rows", [1, 2, 17, 40])  # GEMV, few, more, unpacked to memory or rounded


@pytest.mark.parametrize("outputs", [256, 3072, 5120, 16384])
def test_kernels_of_rounded_rows_change_where_it_is_said(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_matrix, "multiplies_fp8", lambda: True)
    said = row_switches([matrix_in("fp8", outputs, 128)])
    tilings = [fp8_tiling(outputs, 8192, rows) for rows in range(1, 8000)]
    changes = {rows for rows in range(1, 7999) if tilings[rows] != tilings[rows - 1]}
    assert {64, 128} <= changes <= said


@pytest.mark.parametrize("kib", [99, 227], ids=["L4", "H200"])
def test_tilings_of_rounded_rows_fit_the_device(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for outputs in (256, 3072, 5120, 8192, 16384, 28672):
        for rows in (20, 65, 129, 257, 500, 2000, 20000):
            monkeypatch.setattr(gpu_features, "shared_bytes", lambda: None)
            wanted = fp8_tiling(outputs, 4096, rows)
            monkeypatch.setattr(gpu_features, "shared_bytes", lambda: kib * 1024)
            tiling = fp8_tiling(outputs, 4096, rows)
            assert tiling.stages * (tiling.block_n + tiling.block_m) * tiling.block_k < kib * 1024 and tiling.stages >= 3
            assert replace(tiling, stages=wanted.stages) == wanted
            assert kib < 227 or tiling == wanted


def test_many_rows_by_the_same_weights_in_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied with the packed ones, and nothing is unpacked for many."""
    monkeypatch.setattr(quantized_matrix, "UNPACK_ROWS", 30)
    matrix, norm = matrix_in("int8", 40, 256), norm_of(256)
    matrix.twin = numbers(40, 256)
    share_room([matrix], 64, torch.zeros(1))
    assert matrix.room is not None and not matrix.room.weights.numel()
    for rows, weight in ((30, matrix.packed.unpacked(torch.float32)), (31, matrix.twin)):
        x, out = numbers(rows, 256), torch.full((rows, 40), torch.nan)
        matrix.apply(x, norm, out)
        torch.testing.assert_close(out, linear(normed(x, norm), weight), **CLOSE)


@each_way
@pytest.mark.parametrize(("form", "rounds"), [("int4", False), ("int8", False), ("fp8", False), ("fp8", True)])
def test_a_matrix_by_all_its_ways(form: str, rounds: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_matrix, "UNPACK_ROWS", 30)
    monkeypatch.setattr(quantized_matrix, "_UNPACKED", 10 * 256)
    monkeypatch.setattr(quantized_matrix, "multiplies_fp8", lambda: rounds)
    matrix, norm, x = matrix_in(form, 2 * 16, 256, bias=True), norm_of(256), numbers(rows, 256)
    weight, bias = matrix.packed.unpacked(torch.float32), matrix.bias
    assert bias is not None
    close = {"rtol": 3e-2, "atol": 0.3} if rounds and rows > 16 else CLOSE
    out = torch.full((rows, 32), torch.nan)
    matrix.apply(x, norm, out)
    expected = linear(normed(x, norm), weight, bias)
    torch.testing.assert_close(out, expected, **close)
    matrix.add(x, out)
    torch.testing.assert_close(out, expected + linear(x, weight, bias), **close)
    active = torch.full((rows, 16), torch.nan)
    matrix.gate(x, norm, torch.full((rows, 32), torch.nan), active)
    gate, up = expected.chunk(2, dim=-1)
    torch.testing.assert_close(active, silu(gate) * up, **close)


@pytest.mark.parametrize("rows", [2, 17])
def test_rows_of_16_bits_below_it(rows: int) -> None:
    """As adapters have them."""
    matrix, x = matrix_in("int4", 24, 256, bias=True), numbers(rows, 256)
    wide, more = matrix.widened(6)
    more.copy_(numbers(6, 256))
    out = torch.full((rows, wide.outputs), torch.nan)
    wide.product(x, out)
    torch.testing.assert_close(out[:, :24], linear(x, matrix.packed.unpacked(torch.float32), matrix.bias), **CLOSE)
    torch.testing.assert_close(out[:, 24:], linear(x, more), **CLOSE)


def test_what_no_kernel_reads_is_unpacked() -> None:
    weight = few_bits("int8", 8, 96)
    weight.scale = torch.rand(8, 4)  # groups of 24
    expected = weight.unpacked(torch.float32)
    made = matrix_of(Linear(LinearPart(weight)), torch.float32)
    assert isinstance(made, Matrix) and torch.equal(made.weight, expected)


def test_packing_lets_go_of_the_bytes() -> None:
    linear_map = Linear(LinearPart(few_bits("int4", 8, 256)))
    made = matrix_of(linear_map, torch.float32)
    assert isinstance(made, QuantizedMatrix) and linear_map.parts[0].weight is made.packed
