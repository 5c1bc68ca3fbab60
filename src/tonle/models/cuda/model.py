"""The forward pass on CUDA: a decoder's weights, fixed buffers, and the order of kernels.

Does: `decode` (a whole step of rows that go on from their last tokens), or `body` and `head` (a step with prompts in it),
for a given number of tokens, with no word to the host, so that each can be captured in a graph; each with adapters or without.
Does not: capture (`engine/run/`), fill the step's buffer, or compute a piece of a layer other than attention (`pieces.py`).
"""

from __future__ import annotations

import torch

from tonle.models.adapters import Adapter
from tonle.models.cuda.adapted import AdaptedLayer, CudaAdapters, PinnedAdapter, padded_rank
from tonle.models.cuda.batch import Count, Sizes, StepBuffer
from tonle.models.cuda.cuda_layer import CudaLayer
from tonle.models.cuda.cuda_rope import angle_table, rotate_and_store
from tonle.models.cuda.decode_attention import DecodeScratch, decode_attention
from tonle.models.cuda.decode_tiling import few_rows
from tonle.models.cuda.embed import embed, gather
from tonle.models.cuda.experts import ExpertScratch
from tonle.models.cuda.experts_grouped import changes
from tonle.models.cuda.gemv_adapter import OneRowScratch
from tonle.models.cuda.gpu_features import converts_fp8
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.lora import NORM_FEW_TOKENS, SlotTiles, few_tokens
from tonle.models.cuda.mask import mask_logits
from tonle.models.cuda.matrix import Matrix, Norm, share_scratch
from tonle.models.cuda.pieces import AdaptedPieces, BasePieces, Buffers, Pieces
from tonle.models.cuda.pointwise import norm_whole, shape_logits
from tonle.models.cuda.prefill_attention import prefill_attention
from tonle.models.cuda.quantized_matrix import AnyMatrix, QuantizedMatrix, matrix_of, row_switches, share_room
from tonle.models.cuda.sample import RowSettings, SampleScratch, sample
from tonle.models.cuda.skinny import MAX_ROWS
from tonle.models.cuda.slot_tiling import DECODE_WIDTH, MIXED_WIDTH, max_slot_tiles
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.layer_order import Piece, layer_order
from tonle.models.spec import RopeSpec


class CudaModel:
    """Owns the buffers of a step. Set `kv` before the first call."""

    def __init__(self, decoder: Decoder, sizes: Sizes, table_width: int, num_positions: int) -> None:
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        self.spec = spec
        self.sizes = sizes
        self.kv: KVCache | None = None
        self.adapters: CudaAdapters | None = None
        self._weights = decoder.weights
        self._embedding = decoder.weights.embedding
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(dtype).item()  # rounded as torch would

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        tokens, rows = sizes.max_tokens, sizes.max_rows
        self._hidden = buffer(tokens, spec.hidden_size)
        normed = buffer(tokens, spec.hidden_size)
        self._qkv = buffer(tokens, spec.q_size + 2 * spec.kv_size)
        self._attended = buffer(tokens, spec.q_size)
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
        angles: dict[RopeSpec | None, torch.Tensor | None] = {None: None}
        angles |= {rope: angle_table(rotary, num_positions, dtype, device) for rope, rotary in decoder.rotaries.items()}
        self._layers = [
            CudaLayer.of(layer, weights, spec.norm_eps, angles[layer.attention.rope], normed)
            for layer, weights in zip(spec.layers, decoder.weights.layers, strict=True)
        ]
        self._final_norm = Norm(decoder.weights.final_norm.weight, spec.norm_eps, normed)
        self._lm_head = matrix_of(decoder.weights.lm_head, dtype)
        head = self._lm_head
        if spec.tie_embeddings and isinstance(head, QuantizedMatrix) and head.packed.shape == self._embedding.shape:
            head.twin = self._embedding
        self._share()

    def _share(self) -> None:
        """What all layers use in turn, large enough for each."""
        norms_after = any(layer.spec.norm_after for layer in self._layers)
        matrices: list[AnyMatrix] = [matrix for layer in self._layers for matrix in layer.matrices.values()]
        matrices.append(self._lm_head)
        if experts := [layer.experts for layer in self._layers if layer.experts is not None]:
            matrices += [matrix for one in experts for matrix in one.matrices]
            scratch = ExpertScratch(experts, self.sizes.max_tokens)
            for one in experts:
                one.scratch = scratch
        inner = max(layer.gate_up.outputs for layer in self._layers)
        if self.adapters is not None:
            wide = [matrix.wide for layer in self.adapters.layers for matrix in layer.matrices]
            inner = max(matrix.outputs for matrix in wide)
            matrices += [matrix for matrix in wide if isinstance(matrix, Matrix)]
        share_scratch(matrices, self.logits.device)
        share_room(matrices, self.sizes.max_tokens, self.logits)
        self._row_switches = row_switches(matrices)
        self._buffers = Buffers(self.sizes.max_tokens, inner, self.spec.hidden_size if norms_after else 0, self.logits)

    # -- adapters

    def enable_adapters(self, num_slots: int, max_rank: int) -> None:
        """Room for adapters in so many slots, the number `sizes` has. Weights move, so this comes before any graph."""
        assert num_slots == self.sizes.adapter_slots
        scratch = self._one_row_scratch = OneRowScratch(padded_rank(max_rank), self.logits.device)
        slot = self.batch["sample_slots"][:1]
        adapted = []
        for layer, weights in zip(self._layers, self._weights.layers, strict=True):
            layer.adapted = AdaptedLayer.of(weights, layer.matrices, num_slots, scratch, slot)
            adapted.append(layer.adapted)
            if self.logits.is_cuda:
                torch.cuda.empty_cache()  # the memory the weights had before: of no size that the next ones need
        self.adapters = CudaAdapters(adapted, num_slots, scratch.rank)
        self._share()

    def prepare_adapter(self, adapter: Adapter) -> PinnedAdapter:
        """As slots take it: most of the work of loading one, for any thread."""
        assert self.adapters is not None, "enable_adapters comes first"
        return self.adapters.pin(adapter.added_at(self.spec.residual_scale))

    @torch.inference_mode()
    def set_adapter(self, slot: int, adapter: Adapter | PinnedAdapter | None) -> None:
        """Steps launched from now on compute rows of this slot with this adapter; None: with none."""
        assert self.adapters is not None, "enable_adapters comes first"
        self.adapters.set(slot, self.prepare_adapter(adapter) if isinstance(adapter, Adapter) else adapter)

    def _pieces(self, adapted: bool, tokens: int, of: str) -> Pieces:
        """For so many tokens: `of` "sample" in steps without prompts and for samples, "token" in steps with prompts."""
        live = self.batch["counts"][Count.SAMPLES if of == "sample" else Count.TOKENS :][:1]
        if not adapted or tokens == 1:
            return BasePieces(self._buffers, live, adapted=adapted)
        width = DECODE_WIDTH if of == "sample" else MIXED_WIDTH
        most = max_slot_tiles(tokens, self.sizes.adapter_slots, width)
        tiles = SlotTiles(self.batch[f"{of}_slots"], self.batch[f"{of}_slot_tiles"], width, most)
        return AdaptedPieces(self._buffers, live, tiles)

    # -- compiling

    def compile(self) -> None:
        """Compile what steps of any size launch, side by side. Nothing of ours runs; cuBLAS does, on zeros."""
        every = self._layers
        kinds = list({layer.spec: layer for layer in every}.values())  # the others launch the same kernels
        self._layers = [*kinds, kinds[0]][: len(every)]  # one more, for `body` stops before the last one's products
        with compiling_only():
            self._compile_steps(adapted=False)
            if self.adapters is not None:
                self._compile_steps(adapted=True)
            nothing = torch.zeros(4, dtype=torch.int32, device=self.logits.device)
            few = self.logits[:1].float()
            self.draw(nothing, nothing, nothing, few, self.sampled)
            self.mask(nothing.long(), nothing, nothing, few)
        self._layers = every

    def _compile_steps(self, *, adapted: bool) -> None:
        # From each of these sizes on, steps launch other kernels; mixed steps are padded to MAX_ROWS tokens at least.
        many = few_rows(self.spec.num_kv_heads) + 1
        sizes = {1, 2, many, MAX_ROWS + 1, *(rows + 1 for rows in self._row_switches)}
        for layer in self._layers:
            sizes |= changes(layer.spec.mixer) if layer.experts is not None else set()
        if adapted:
            assert self.adapters is not None
            sizes |= {NORM_FEW_TOKENS + 1, few_tokens(self.adapters.rank) + 1}
            for tokens in {
                min(tokens, self.sizes.max_tokens) for tokens in sizes
            }:  # more, perhaps, than there are rows
                self.describe(torch.zeros(tokens, dtype=torch.int64, device=self.logits.device), slot=0)
        else:
            self.hidden_states(torch.zeros(1, dtype=torch.int64, device=self.logits.device))
        for rows in {min(rows, self.sizes.max_sequences) for rows in sizes}:
            self.decode(rows, adapted=adapted)
        for rows in {min(rows, self.sizes.max_rows) for rows in sizes}:
            self.head(rows, adapted=adapted)
        for tokens in {min(max(MAX_ROWS, tokens), self.sizes.max_tokens) for tokens in sizes}:
            self.body(tokens, tiles=1, adapted=adapted)

    # -- steps

    def decode(self, rows: int, *, adapted: bool = False) -> None:
        """A step where every row goes on from its last token, padded to `rows`: token i is sample i."""
        hidden, attended = self._hidden[:rows], self._attended[:rows]
        embed(self.batch, self.last, self._embedding, self.tables, hidden, self._embedding_scale)
        pieces = self._pieces(adapted, rows, "sample")
        for index in range(len(self._layers)):
            self._until_attended(index, pieces, hidden, None)
            self._from_attended(index, pieces, attended, hidden)
        self._choose(pieces, hidden)

    def body(self, tokens: int, *, tiles: int, adapted: bool = False) -> None:
        """A mixed step of up to `tokens` tokens and `tiles` tiles of prompts, up to the last layer's attention.

        All keys and values are in the cache then. What follows concerns only the tokens whose logits are wanted.
        """
        hidden, attended = self._hidden[:tokens], self._attended[:tokens]
        embed(self.batch, self.last, self._embedding, self.tables, hidden, self._embedding_scale)
        pieces = self._pieces(adapted, tokens, "token")
        last = len(self._layers) - 1
        for index in range(len(self._layers)):
            self._until_attended(index, pieces, hidden, tiles)
            if index < last:
                self._from_attended(index, pieces, attended, hidden)

    def head(self, samples: int, *, adapted: bool = False) -> None:
        """The rest of a mixed step, for its samples alone, padded to `samples`: last layer, logits and tokens."""
        hidden, attended = self._wanted_hidden[:samples], self._wanted_attended[:samples]
        gather(self.batch, self._hidden, self._attended, hidden, attended)
        pieces = self._pieces(adapted, samples, "sample")
        if samples == 1 and adapted and self._layers[-1].experts is not None:
            self._one_row_scratch.clear()  # the adapted product ahead is the one of another step's last layer, too
        self._from_attended(-1, pieces, attended, hidden)
        self._choose(pieces, hidden)

    def describe(self, indices: torch.Tensor, slot: int = -1) -> torch.Tensor:
        """Logits (n, vocab) float32 of tokens `indices` (n,) int64 of a mixed step, between its `body` and its `head`.

        All of them have the adapter in `slot`. Works on copies, so `head` finds what `body` left. Allocates, so it is never
        captured.
        """
        pieces, hidden = self._last_layer(indices, slot)
        logits = self.logits.new_empty(len(hidden), self.spec.vocab_size)
        self._finish(pieces, hidden, logits)
        return logits[: len(indices)].float()

    def hidden_states(self, indices: torch.Tensor, slot: int = -1) -> torch.Tensor:
        """As `describe`: not logits, but what they are made of (n, hidden) float32, after the last norm."""
        pieces, hidden = self._last_layer(indices, slot)
        return pieces.normed(self._final_norm, hidden)[: len(indices)].to(torch.float32, copy=True)

    def _last_layer(self, indices: torch.Tensor, slot: int) -> tuple[Pieces, torch.Tensor]:
        """Hidden states (n, hidden) of a mixed step's tokens after the last layer, on copies; n is 2 at least with an adapter."""
        if slot >= 0 and len(indices) == 1:
            indices = indices.expand(2)  # steps of one row find its slot elsewhere
        live = torch.full((1,), len(indices), dtype=torch.int32, device=self.logits.device)
        pieces: Pieces = BasePieces(self._buffers, live)
        if slot >= 0:
            pieces = AdaptedPieces(self._buffers, live, self._tiles_of_one(len(indices), slot))
        hidden, attended = self._hidden.index_select(0, indices), self._attended.index_select(0, indices)
        self._from_attended(-1, pieces, attended, hidden)
        return pieces, hidden

    def _tiles_of_one(self, tokens: int, slot: int) -> SlotTiles:
        """So many tokens of one slot."""
        most = max_slot_tiles(tokens, 0, DECODE_WIDTH)
        order = torch.arange(most * DECODE_WIDTH, dtype=torch.int32, device=self.logits.device)
        tiles = order.new_full((most, 1 + DECODE_WIDTH), slot)
        tiles[:, 1:] = torch.where(order < tokens, order, -1).view(most, DECODE_WIDTH)
        return SlotTiles(order.new_full((tokens,), slot), tiles.flatten(), DECODE_WIDTH, most)

    # -- their parts

    def _until_attended(self, index: int, pieces: Pieces, hidden: torch.Tensor, tiles: int | None) -> None:
        """A layer up to its attention: hidden (T, hidden) -> `_attended`. `tiles` None: every row goes on."""
        layer, tokens = self._layers[index], hidden.shape[0]
        qkv = self._qkv[:tokens]
        order = layer_order(layer.spec)
        for piece in order[: order.index(Piece.ATTEND) + 1]:
            if piece is Piece.PROJECT:
                pieces.project(layer, hidden, qkv)
            else:
                assert piece is Piece.ATTEND
                self._attention(index, layer, qkv, self._attended[:tokens], tiles)

    def _from_attended(self, index: int, pieces: Pieces, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        """The rest of a layer: what attention (n, heads * D) and mixer give is added to hidden (n, hidden)."""
        layer, count = self._layers[index], hidden.shape[0]
        size = layer.spec.mixer.size
        active = self._active.flatten()[: count * size].view(count, size)
        order = layer_order(layer.spec)
        for piece in order[order.index(Piece.ATTEND) + 1 :]:
            match piece:
                case Piece.ADD_ATTENDED:
                    pieces.add_attended(layer, attended, hidden)
                case Piece.MIX:
                    pieces.mix(layer, hidden, active)
                case Piece.ADD_MIXED:
                    pieces.add_mixed(layer, active, hidden)
                case _:
                    raise AssertionError(piece)

    def _choose(self, pieces: Pieces, hidden: torch.Tensor) -> None:
        """Logits and tokens of the step's samples, from their hidden states (S, hidden)."""
        logits = self.logits[: hidden.shape[0]]
        self._finish(pieces, hidden, logits)
        counts = self.batch["counts"][Count.SAMPLES :]
        self.draw(counts, self.batch["sample_rows"], self.batch["sample_positions"], logits, self.sampled)

    def _finish(self, pieces: Pieces, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Logits (n, vocab) of hidden states (n, hidden)."""
        pieces.finish(self._final_norm, hidden, self._lm_head, logits)
        if self.spec.logit_scale != 1 or self.spec.logit_soft_cap is not None:
            shape_logits(logits, self.spec.logit_scale, self.spec.logit_soft_cap)

    def draw(
        self, count: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Tokens of the first `count[0]` of logits (S, vocab), by their rows' settings, to out (S,) and to `last`."""
        sample(count, rows, positions, logits, self.settings, self.sample_scratch, out, self.last)

    def mask(self, places: torch.Tensor, mask_rows: torch.Tensor, masks: torch.Tensor, out: torch.Tensor) -> None:
        """Logits of samples `places` to out (n, vocab) float32, with what masks[mask_rows] do not allow taken out."""
        mask_logits(places, mask_rows, masks, self.logits, out)

    def _attention(self, index: int, layer: CudaLayer, qkv: torch.Tensor, out: torch.Tensor, tiles: int | None) -> None:
        assert self.kv is not None
        spec, cache, described = self.spec, self.kv.layer(index), layer.spec.attention
        if not converts_fp8():
            cache = cache.as_bytes()
        window, scale, soft_cap = described.window, described.scale, described.soft_cap
        q_gain, k_gain = layer.q_gain, layer.k_gain
        if described.qk_norm_whole and q_gain is not None and k_gain is not None:
            norm_whole(qkv, q_gain, k_gain, spec.norm_eps)
            q_gain = k_gain = None
        if tiles is not None:
            rotate_and_store(self.batch, qkv, cache, layer.angles, q_gain, k_gain, spec.norm_eps,
                             spec.num_heads)  # fmt: skip
            prefill_attention(self.batch, self.tables, qkv, cache, out, tiles=tiles, num_heads=spec.num_heads,
                              window=window, scale=scale, soft_cap=soft_cap, sinks=layer.sinks)  # fmt: skip
        decode_attention(
            self.batch, self.tables, qkv, cache, out, self._decode_scratch, rows=min(qkv.shape[0], self.sizes.max_rows),
            num_heads=spec.num_heads, window=window, angles=layer.angles, q_gain=q_gain,
            k_gain=k_gain, eps=spec.norm_eps, fused=tiles is None, scale=scale, soft_cap=soft_cap, sinks=layer.sinks,
        )  # fmt: skip
