"""The forward pass on CUDA: a decoder's weights, fixed buffers, and the order of kernels.

Does: `decode` (a whole step of rows that go on from their last tokens), or `body` and `head` (a step with prompts in it),
for a given number of tokens, with no allocation and no word to the host, so that each can be captured in a graph. Does not:
capture (`engine/run/`), fill the step's buffer, or choose how a matrix is multiplied (`matrix.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tonle.models.cuda.batch import Count, Sizes, StepBuffer
from tonle.models.cuda.cuda_rope import angle_table, rotate_and_store
from tonle.models.cuda.decode_attention import DecodeScratch, decode_attention
from tonle.models.cuda.decode_tiling import few_rows
from tonle.models.cuda.embed import embed, gather
from tonle.models.cuda.gpu_features import roomy
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.matrix import Matrix, Norm, share_scratch
from tonle.models.cuda.prefill_attention import prefill_attention
from tonle.models.cuda.sample import RowSettings, SampleScratch, sample
from tonle.models.cuda.skinny import MAX_ROWS
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.layers import Layer
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec


def unsupported(spec: ModelSpec) -> str | None:
    """Why these kernels cannot run a model, or None."""
    if spec.head_dim not in (16, 32, 64, 128, 256):
        return f"head_dim {spec.head_dim} is none of 16, 32, 64, 128, 256"
    if spec.head_dim == 256 and not roomy():
        return "head_dim 256 needs 128 KiB of shared memory per multiprocessor, as data center GPUs have"
    plain = LayerSpec(
        attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None), mixer=MixerSpec(size=1)
    )
    for layer in spec.layers:
        attention, mixer = layer.attention, layer.mixer
        same = replace(attention, scale=None, soft_cap=None, sinks=False, rope=spec.ropes[0])
        if layer != replace(plain, attention=same, mixer=replace(plain.mixer, size=mixer.size, bias=mixer.bias)):
            return "its layers are of a kind without CUDA kernels"
    if spec.hidden_size % 16 or spec.intermediate_size % 16:
        return "hidden_size and intermediate_size must be multiples of 16"
    return None


@dataclass(slots=True, eq=False)
class _CudaLayer:
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Norm
    mlp_norm: Norm
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    window: int | None

    @classmethod
    def of(cls, layer: Layer, window: int | None, eps: float, normed: torch.Tensor) -> _CudaLayer:
        assert layer.input_norm is not None and layer.mlp_norm is not None  # `unsupported` says so
        return cls(
            qkv=Matrix.of(layer.qkv),
            o=Matrix.of(layer.o),
            gate_up=Matrix.of(layer.gate_up),
            down=Matrix.of(layer.down),
            input_norm=Norm(layer.input_norm.weight, eps, normed),
            mlp_norm=Norm(layer.mlp_norm.weight, eps, normed),
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
        self._embedding = decoder.weights.embedding
        self._angles = angle_table(next(iter(decoder.rotaries.values())), num_positions, dtype, device)

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        tokens, rows = sizes.max_tokens, sizes.max_rows
        self._hidden = buffer(tokens, spec.hidden_size)
        normed = buffer(tokens, spec.hidden_size)
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
        self._layers = [
            _CudaLayer.of(layer, window, spec.norm_eps, normed)
            for layer, window in zip(decoder.weights.layers, spec.windows, strict=True)
        ]
        self._final_norm = Norm(decoder.weights.final_norm.weight, spec.norm_eps, normed)
        self._lm_head = Matrix.of(decoder.weights.lm_head)
        layers = [matrix for layer in self._layers for matrix in (layer.qkv, layer.o, layer.down)]
        share_scratch([*layers, self._lm_head], device)

    def compile(self) -> None:
        """Compile what steps of any size launch, side by side. Nothing of ours runs; cuBLAS does, on zeros."""
        every = self._layers
        kinds = list({layer.window: layer for layer in every}.values())  # the others launch the same kernels
        self._layers = [*kinds, kinds[0]][: len(every)]  # one more, for `body` stops before the last one's products
        with compiling_only():
            # from each of these sizes on, steps launch other kernels; mixed steps are padded to MAX_ROWS tokens at least
            many = few_rows(self.spec.num_kv_heads) + 1
            for rows in {min(rows, self.sizes.max_rows) for rows in (1, 2, many, MAX_ROWS + 1)}:
                self.decode(rows)
                self.head(rows)
            for tokens in {
                min(tokens, self.sizes.max_tokens) for tokens in (MAX_ROWS, MAX_ROWS + 1, max(MAX_ROWS, many))
            }:
                self.body(tokens, tiles=1)
            nothing = torch.zeros(4, dtype=torch.int32, device=self.logits.device)
            self.draw(nothing, nothing, nothing, self.logits[:1].float(), self.sampled)
        self._layers = every

    # -- steps

    def decode(self, rows: int) -> None:
        """A step where every row goes on from its last token, padded to `rows`: token i is sample i."""
        hidden = self._hidden[:rows]
        embed(self.batch, self.last, self._embedding, self.tables, hidden)
        for index, layer in enumerate(self._layers):
            self._attend(index, layer, hidden, None)
            self._finish_layer(layer, self._attended[:rows], hidden)
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
        self._lm_head.apply(hidden, self._final_norm, logits)
        return logits.float()

    # -- their parts

    def _choose(self, hidden: torch.Tensor) -> None:
        """Logits and tokens of the step's samples, from their hidden states (S, hidden)."""
        logits = self.logits[: hidden.shape[0]]
        self._lm_head.apply(hidden, self._final_norm, logits)
        counts = self.batch["counts"][Count.SAMPLES :]
        self.draw(counts, self.batch["sample_rows"], self.batch["sample_positions"], logits, self.sampled)

    def draw(
        self, count: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Tokens of the first `count[0]` of logits (S, vocab), by their rows' settings, to out (S,) and to `last`."""
        sample(count, rows, positions, logits, self.settings, self.sample_scratch, out, self.last)

    def _attend(self, index: int, layer: _CudaLayer, hidden: torch.Tensor, tiles: int | None) -> None:
        """A layer up to its attention: hidden (T, hidden) -> `_attended`. `tiles` None: every row goes on."""
        tokens = hidden.shape[0]
        qkv = self._qkv[:tokens]
        layer.qkv.apply(hidden, layer.input_norm, qkv)
        self._attention(index, layer, qkv, self._attended[:tokens], tiles)

    def _finish_layer(self, layer: _CudaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        """A layer from its attention on: attended (n, heads * D) and the MLP are added to hidden (n, hidden)."""
        count = hidden.shape[0]
        active = self._active[:count]
        layer.o.add(attended, hidden)
        layer.gate_up.gate(hidden, layer.mlp_norm, self._gate_up[:count], active)
        layer.down.add(active, hidden, settled=True)  # since `o`, two kernels ago

    def _attention(
        self, index: int, layer: _CudaLayer, qkv: torch.Tensor, out: torch.Tensor, tiles: int | None
    ) -> None:
        assert self.kv is not None
        spec, cache = self.spec, self.kv.layer(index)
        if tiles is not None:
            rotate_and_store(self.batch, qkv, cache, self._angles, layer.q_gain, layer.k_gain, spec.norm_eps,
                             spec.num_heads)  # fmt: skip
            prefill_attention(self.batch, self.tables, qkv, cache, out, tiles=tiles, num_heads=spec.num_heads,
                              window=layer.window)  # fmt: skip
        decode_attention(
            self.batch, self.tables, qkv, cache, out, self._decode_scratch, rows=min(qkv.shape[0], self.sizes.max_rows),
            num_heads=spec.num_heads, window=layer.window, angles=self._angles, q_gain=layer.q_gain,
            k_gain=layer.k_gain, eps=spec.norm_eps, fused=tiles is None,
        )  # fmt: skip
