"""The forward pass on CUDA: a decoder's weights, fixed buffers, and the order of kernels.

Does: `decode` (a whole step of rows that go on from their last tokens), or `body` and `head` (a step with prompts in it),
for a given number of tokens, with no allocation and no word to the host, so that each can be captured in a graph. Does not:
capture (`engine/run/`), or fill the step's buffer. One token: our own products with everything fused. More: cuBLAS and
small kernels between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonle.models.cuda.batch import Sizes, StepBuffer
from tonle.models.cuda.decode import DecodeScratch, decode_attention
from tonle.models.cuda.embed import embed, gather
from tonle.models.cuda.gemv import gemv
from tonle.models.cuda.pointwise import rms_norm, silu_mul
from tonle.models.cuda.prefill import prefill_attention
from tonle.models.cuda.rope import angle_table, rotate_and_store
from tonle.models.cuda.sample import RowSettings, SampleScratch, sample
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.layers import Layer, Linear
from tonle.models.spec import ModelSpec


def unsupported(spec: ModelSpec) -> str | None:
    """Why these kernels cannot run a model, or None."""
    if spec.head_dim not in (16, 32, 64, 128, 256):
        return f"head_dim {spec.head_dim} is none of 16, 32, 64, 128, 256"
    if spec.hidden_size % 16 or spec.intermediate_size % 16:
        return "hidden_size and intermediate_size must be multiples of 16"
    return None


@dataclass(slots=True, eq=False)
class _Matrix:
    """A weight (out, in), its transpose as cuBLAS wants it, and its bias."""

    weight: torch.Tensor
    columns: torch.Tensor  # (in, out), a view
    bias: torch.Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> _Matrix:
        """Weights that belong to a live model come in parts, and are copied into one here."""
        weights = [part.weight.t() if part.transposed else part.weight for part in linear.parts]
        biases = [part.bias for part in linear.parts if part.bias is not None]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        return cls(weight, weight.t(), torch.cat(biases) if biases else None)

    def apply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.columns, out=out)
        else:
            torch.addmm(self.bias, x, self.columns, out=out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.addmm_(x, self.columns)
        if self.bias is not None:
            out.add_(self.bias)


@dataclass(slots=True, eq=False)
class _CudaLayer:
    qkv: _Matrix
    o: _Matrix
    gate_up: _Matrix
    down: _Matrix
    input_gain: torch.Tensor
    mlp_gain: torch.Tensor
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    window: int | None

    @classmethod
    def of(cls, layer: Layer, window: int | None) -> _CudaLayer:
        return cls(
            qkv=_Matrix.of(layer.qkv),
            o=_Matrix.of(layer.o),
            gate_up=_Matrix.of(layer.gate_up),
            down=_Matrix.of(layer.down),
            input_gain=layer.input_norm.weight,
            mlp_gain=layer.mlp_norm.weight,
            q_gain=None if layer.q_norm is None else layer.q_norm.weight,
            k_gain=None if layer.k_norm is None else layer.k_norm.weight,
            window=window,
        )


class CudaModel:
    """Owns the buffers of a step. Set `kv` before the first call."""

    def __init__(self, decoder: Decoder, sizes: Sizes, table_width: int, num_positions: int) -> None:
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        self.spec = spec
        self.sizes = sizes
        self.kv: KVCache | None = None
        self._layers = [
            _CudaLayer.of(layer, window) for layer, window in zip(decoder.weights.layers, spec.windows, strict=True)
        ]
        self._embedding = decoder.weights.embedding
        self._lm_head = _Matrix.of(decoder.weights.lm_head)
        self._final_gain = decoder.weights.final_norm.weight
        self._angles = angle_table(decoder.rotary, num_positions, dtype, device)

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        tokens, rows = sizes.max_tokens, sizes.max_rows
        self._hidden = buffer(tokens, spec.hidden_size)
        self._normed = buffer(tokens, spec.hidden_size)
        self._qkv = buffer(tokens, spec.q_size + 2 * spec.kv_size)
        self._attended = buffer(tokens, spec.q_size)
        self._gate_up = buffer(tokens, 2 * spec.intermediate_size)
        self._active = buffer(tokens, spec.intermediate_size)
        self._wanted_hidden = buffer(rows, spec.hidden_size)  # of a mixed step's samples
        self._wanted_attended = buffer(rows, spec.q_size)
        self.logits = buffer(rows, spec.vocab_size)
        self.batch = StepBuffer(sizes, device=device)
        self.tables = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)  # sampled last, by row
        self.sampled = torch.zeros(rows, dtype=torch.int32, device=device)  # by place in the step
        self.settings = RowSettings(rows, device)
        self._decode_scratch = DecodeScratch(rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, device)
        self.sample_scratch = SampleScratch(rows, device)

    # -- steps

    def decode(self, rows: int) -> None:
        """A step where every row goes on from its last token, padded to `rows`: token i is sample i."""
        hidden = self._hidden[:rows]
        embed(self.batch, self.last, self._embedding, self.tables, hidden)
        self._decode_layers(hidden)
        self._choose(hidden)

    def body(self, tokens: int, *, tiles: int) -> None:
        """A mixed step of up to `tokens` tokens and `tiles` tiles of prompts, up to the last layer's attention.

        All keys and values are in the cache then. What follows concerns only the tokens whose logits are wanted.
        """
        hidden = self._hidden[:tokens]
        embed(self.batch, self.last, self._embedding, self.tables, hidden)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            self._attend(index, layer, hidden, tiles)
            if index < last:
                self._finish_layer(layer, self._attended[:tokens], hidden)

    def head(self, samples: int) -> None:
        """The rest of a mixed step, for its samples alone, padded to `samples`: last layer, logits and tokens."""
        hidden, attended = self._wanted_hidden[:samples], self._wanted_attended[:samples]
        gather(self.batch, self._hidden, self._attended, hidden, attended)
        self._finish_layer(self._layers[-1], attended, hidden)
        self._choose(hidden)

    def describe(self, indices: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) float32 of tokens `indices` (n,) int64 of a mixed step, between its `body` and its `head`.

        Works on copies, so `head` finds what `body` left. Allocates, so it is never captured.
        """
        hidden, attended = self._hidden.index_select(0, indices), self._attended.index_select(0, indices)
        self._finish_layer(self._layers[-1], attended, hidden)
        logits = self.logits.new_empty(indices.shape[0], self.spec.vocab_size)
        self._project(hidden, logits)
        return logits.float()

    # -- their parts

    def _decode_layers(self, hidden: torch.Tensor) -> None:
        """All layers of a step where every row goes on; hidden (rows, hidden) in place."""
        for index, layer in enumerate(self._layers):
            self._attend(index, layer, hidden, None)
            self._finish_layer(layer, self._attended[: hidden.shape[0]], hidden)

    def _choose(self, hidden: torch.Tensor) -> None:
        """Logits and tokens of the step's samples, from their hidden states (S, hidden)."""
        logits = self.logits[: hidden.shape[0]]
        self._project(hidden, logits)
        counts = self.batch["counts"][4:5]
        sample(counts, self.batch["sample_rows"], self.batch["sample_positions"], logits, self.settings,
               self.sample_scratch, self.sampled, self.last)  # fmt: skip

    def _project(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Final norm and output matrix: hidden (n, hidden) -> logits (n, vocab)."""
        lm_head, gain, eps = self._lm_head, self._final_gain, self.spec.norm_eps
        if hidden.shape[0] == 1:
            gemv(hidden, lm_head.weight, logits, gain=gain, eps=eps, bias=lm_head.bias)
        else:
            lm_head.apply(rms_norm(hidden, gain, eps, self._normed[: hidden.shape[0]]), logits)

    def _attend(self, index: int, layer: _CudaLayer, hidden: torch.Tensor, tiles: int | None) -> None:
        """A layer up to its attention: hidden (T, hidden) -> `_attended`. `tiles` None: every row goes on."""
        tokens, eps = hidden.shape[0], self.spec.norm_eps
        qkv = self._qkv[:tokens]
        if tokens == 1:
            gemv(hidden, layer.qkv.weight, qkv, gain=layer.input_gain, eps=eps, bias=layer.qkv.bias)
        else:
            layer.qkv.apply(rms_norm(hidden, layer.input_gain, eps, self._normed[:tokens]), qkv)
        self._attention(index, layer, qkv, self._attended[:tokens], tiles)

    def _finish_layer(self, layer: _CudaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        """A layer from its attention on: attended (n, heads * D) and the MLP are added to hidden (n, hidden)."""
        count, eps = hidden.shape[0], self.spec.norm_eps
        active = self._active[:count]
        if count == 1:
            gemv(attended, layer.o.weight, hidden, bias=layer.o.bias, add=True)
            gemv(hidden, layer.gate_up.weight, active, gain=layer.mlp_gain, eps=eps, bias=layer.gate_up.bias, glu=True)
            gemv(active, layer.down.weight, hidden, bias=layer.down.bias, add=True)
        else:
            gate_up = self._gate_up[:count]
            layer.o.add(attended, hidden)
            layer.gate_up.apply(rms_norm(hidden, layer.mlp_gain, eps, self._normed[:count]), gate_up)
            layer.down.add(silu_mul(gate_up, active), hidden)

    def _attention(
        self, index: int, layer: _CudaLayer, qkv: torch.Tensor, out: torch.Tensor, tiles: int | None
    ) -> None:
        assert self.kv is not None
        spec, k_cache, v_cache = self.spec, self.kv.k[index], self.kv.v[index]
        if tiles is not None:
            rotate_and_store(self.batch, qkv, k_cache, v_cache, self._angles, layer.q_gain, layer.k_gain,
                             spec.norm_eps, spec.num_heads)  # fmt: skip
            prefill_attention(self.batch, self.tables, qkv, k_cache, v_cache, out, tiles=tiles,
                              num_heads=spec.num_heads, window=layer.window)  # fmt: skip
        rows = min(qkv.shape[0], self.sizes.max_rows)
        decode_attention(
            self.batch, self.tables, qkv, k_cache, v_cache, out, self._decode_scratch, rows=rows,
            num_heads=spec.num_heads, window=layer.window, angles=self._angles, q_gain=layer.q_gain,
            k_gain=layer.k_gain, eps=spec.norm_eps, fused=tiles is None,
        )  # fmt: skip
