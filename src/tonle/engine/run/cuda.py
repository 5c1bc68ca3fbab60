"""The runner on CUDA: a plan becomes one copy, one graph (two if there are prompts) and one copy back.

Nothing waits for the device until `collect`.

Rows live on the device: last tokens, block tables, sampling settings; so do adapters, by slot. A step is launched before the
one ahead of it has been read (`lag` 1). Rows with penalties and log-probabilities take extra operations after the graphs,
described prompts and embeddings between the two, still without a wait. Rows bound by a grammar are drawn a second time
(`draw_bound`), when the step ahead has been read; the copy back waits for that, the device computes meanwhile. Guesses are rows
of one token each (`packing.py`), drawn like all others; which of them were right is found when the step is read (`checked.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from tonle.engine.plan import Masks, Plan, StepResult
from tonle.engine.request import ResolvedConfig
from tonle.engine.run.bound_rows import BoundRows
from tonle.engine.run.checked import checked
from tonle.engine.run.graphs import Graphs
from tonle.engine.run.packing import RING, PackedStep, Packer
from tonle.engine.run.pooling import Embeddings, RowPools, WantedStates, token_indices
from tonle.engine.run.runner import DescribedPrompt, LaunchedStep, Runner
from tonle.engine.run.settings import RowSampling, sent
from tonle.engine.sample.adjust import needs_adjusting
from tonle.engine.sample.token_logprobs import RawLogprobs, raw_logprobs
from tonle.models.adapters import Adapter, HeldAdapter
from tonle.models.cuda.model import CudaModel

# Prompt tokens described at a time. Their logits take 10 bytes per entry of the vocabulary: 195 MB of 152,000 entries, which
# the reserve beside the KV cache holds; a whole chunk of 4,096 would take 6 GB.
_PIECE_TOKENS = 128
# Prompt tokens whose last hidden states are computed at a time. They take 4 bytes per number and some more: 30 MB of 4,096.
_STATES_AT_ONCE = 1024


@dataclass(slots=True)
class LaunchedCudaStep(LaunchedStep):
    """A step on the device. `tokens` is pinned memory that is valid once `arrived` has happened."""

    arrived: torch.cuda.Event | None = None
    in_order: bool = False  # tokens are in the plan's order already


class CudaRunner(Runner):
    """Owns the model's buffers, graphs and rows; reads plans, decides nothing."""

    def __init__(
        self, model: CudaModel, packer: Packer, row_sampling: RowSampling, graphs: Graphs, *, lag: int = 1
    ) -> None:
        self.lag = lag
        self.profile: dict[str, float] | None = None
        self._cuda = model.logits.is_cuda
        self._device = model.logits.device
        self._net = model
        self._packer = packer
        self._row_sampling = row_sampling
        self._bound_rows = BoundRows(model, row_sampling, capture=graphs.num_graphs > 0)
        self._graphs = graphs
        self.sizes = graphs.sizes
        self._prompts: dict[int, DescribedPrompt] = {}
        self._pools = RowPools()
        max_rows = model.sizes.max_rows
        self._host_tokens = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._cuda) for _ in range(RING)]
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            self._events = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def checks_drafts(self, config: ResolvedConfig) -> bool:
        """Not where a draw changes the one after it: all places of a row are drawn at once."""
        return not needs_adjusting(config)

    @property
    def max_entries(self) -> int:
        return self._net.sizes.max_rows

    @property
    def kernel_changes(self) -> int:
        return 0  # graphs are captured once, before the first step

    def release_memory(self) -> None:
        """Nothing to give back: the device's memory is the engine's until it sleeps."""

    def prepare_adapter(self, adapter: Adapter) -> HeldAdapter:
        return self._net.prepare_adapter(adapter)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedCudaStep:
        mark = time.perf_counter()
        if self._cuda:
            torch.cuda.set_device(self._device)
        for slot, adapter in plan.adapter_loads:
            assert self.adapters is not None
            self._net.set_adapter(slot, self.adapters.get(adapter))
        if plan.joins:
            self._join(plan)
        if self._row_sampling.adjusting:
            self._row_sampling.catch_up(plan)
        packed = self._packer.pack(plan)
        mark = self._note("build", mark)
        self._copy(packed)
        launched = self._compute(plan, packed)
        mark = self._note("forward", mark)
        if launched.order:
            self._refine(plan, launched)
        if not plan.bound:
            self._start_copy_back(launched)
        self._note("sample", mark)
        return launched

    def mask_rows(self, count: int, words: int) -> np.ndarray:
        """Pinned: they are copied to the device while the next ones are written."""
        return self._bound_rows.masks(count, words)

    @torch.inference_mode()
    def draw_bound(self, launched: LaunchedStep, masks: Masks) -> None:
        assert isinstance(launched, LaunchedCudaStep)
        mark = time.perf_counter()
        plan = launched.plan
        if masks.entries:
            place_of = {i: place for place, i in enumerate(launched.order)}
            places = [place_of[i] for i in masks.entries]
            rows, positions = [plan.rows[i] for i in masks.entries], [plan.place(i) for i in masks.entries]
            self._bound_rows.draw(places, rows, positions, masks.is_filled)
        self._start_copy_back(launched)
        self._note("draw_bound", mark)

    @torch.inference_mode()
    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step and read it back, in the plan's order."""
        assert isinstance(launched, LaunchedCudaStep)
        mark = time.perf_counter()
        if launched.arrived is not None:
            launched.arrived.synchronize()
        self._note("wait", mark)
        if launched.in_order and launched.raw is None:
            return StepResult(tokens=launched.tokens.tolist())
        if launched.plan.drafts:
            result = checked(launched)
            self._collect_prompts(launched, result)
            return result
        return super().collect(launched)

    def _join(self, plan: Plan) -> None:
        self._row_sampling.join(plan.joins)
        self._packer.join(plan.joins)
        for join in plan.joins:
            self._join_prompt(join)

    def _copy(self, packed: PackedStep) -> None:
        self._net.batch.all[: packed.size].copy_(packed.buffer.all[: packed.size], non_blocking=True)
        for row in packed.long_rows:
            self._net.tables[row].copy_(torch.from_numpy(self._packer.tables[row]))
        if packed.lasts:
            rows, tokens = zip(*packed.lasts, strict=True)
            self._net.last.index_copy_(
                0, sent(list(rows), torch.int64, self._device), sent(list(tokens), torch.int32, self._device)
            )

    def _compute(self, plan: Plan, packed: PackedStep) -> LaunchedCudaStep:
        """The step itself: from the tokens it has to those it samples."""
        in_order = packed.sampling is None
        order = list(range(len(plan.rows))) if packed.sampling is None else packed.sampling
        launched = LaunchedCudaStep(plan, order, self._host_tokens[self._turn][: len(order)], in_order=in_order)
        if packed.num_tiles is None:
            self._graphs.decode(packed.num_tokens, adapted=packed.adapted)
            return launched
        self._graphs.body(packed.num_tokens, packed.num_tiles, adapted=packed.adapted)
        if self._prompts:
            self._describe(plan, packed, launched)
        if self._pools.rows:
            launched.embeddings = self._embed(plan, packed)
        if order:
            self._graphs.head(len(order), adapted=packed.adapted)
        return launched

    def _start_copy_back(self, launched: LaunchedCudaStep) -> None:
        """The tokens on their way back."""
        if launched.order:
            launched.tokens.copy_(self._net.sampled[: len(launched.order)], non_blocking=True)
        if self._cuda:
            launched.arrived = self._events[self._turn]
            launched.arrived.record()
        self._turn = (self._turn + 1) % RING

    def _refine(self, plan: Plan, launched: LaunchedCudaStep) -> None:
        """What only some rows ask for: log-probabilities of raw logits, and another draw from adjusted ones."""
        rows = plan.rows if launched.in_order else [plan.rows[i] for i in launched.order]
        launched.wanted = self._row_sampling.logprobs_wanted(rows)
        if launched.wanted:
            places = sent(list(launched.wanted), torch.int64, self._device)
            launched.raw = self._net.logits.index_select(0, places).float()
        if self._row_sampling.adjusting:
            self._row_sampling.resample(plan, launched.order)

    def _describe(self, plan: Plan, packed: PackedStep, launched: LaunchedCudaStep) -> None:
        """Logits of prompt tokens whose successors' log-probabilities are wanted."""
        for i, row in enumerate(plan.rows):
            prompt, chunk = self._prompts.get(row), plan.chunks[i]
            if chunk is None or prompt is None:
                continue
            passed, targets = prompt.part(plan.starts[i], len(chunk))
            if not targets:
                continue
            begin, num_top = packed.begins[i] + passed, prompt.num_top
            pieces = [
                self._describe_piece(begin + first, targets[first : first + _PIECE_TOKENS], num_top, row)
                for first in range(0, len(targets), _PIECE_TOKENS)
            ]
            launched.described.append((i, pieces))

    def _describe_piece(self, first: int, targets: list[int], num_top: int, row: int) -> RawLogprobs:
        """Of the tokens that followed the step's tokens from `first` on, which are those of a row."""
        indices = torch.arange(first, first + len(targets), device=self._device)
        logits = self._net.describe(indices, int(self._packer.adapter_slots[row]))
        return raw_logprobs(logits, targets, num_top)

    # -- embeddings

    def _embed(self, plan: Plan, packed: PackedStep) -> Embeddings | None:
        """The embeddings of the prompts that end in this step, on their way to the host; those that go on are summed up."""
        wanted = self._pools.wanted(plan, packed.begins)
        by_slot: dict[int, list[WantedStates]] = {}
        for each in wanted:
            by_slot.setdefault(int(self._packer.adapter_slots[each.row]), []).append(each)
        for slot, group in by_slot.items():
            self._add_states(group, slot)
        ended = self._pools.finish(wanted)
        if ended is None:
            return None
        vectors = torch.empty(ended.vectors.shape, dtype=torch.float32, pin_memory=self._cuda)
        vectors.copy_(ended.vectors, non_blocking=True)
        return Embeddings(ended.places, vectors)

    def _add_states(self, group: list[WantedStates], slot: int) -> None:
        """Hidden states of rows that have the same adapter, a few tokens at a time, to their rows' sums."""
        indices = torch.tensor(token_indices(group), pin_memory=self._cuda).to(self._device, non_blocking=True)
        rows = [(each.row, each.count) for each in group]
        for first in range(0, len(indices), _STATES_AT_ONCE):
            piece = indices[first : first + _STATES_AT_ONCE]
            states = self._net.hidden_states(piece, slot)
            offset = 0
            while offset < len(piece):
                row, count = rows[0]
                taken = min(count, len(piece) - offset)
                self._pools.add(row, states[offset : offset + taken])
                offset += taken
                rows[0] = row, count - taken
                if taken == count:
                    del rows[0]
