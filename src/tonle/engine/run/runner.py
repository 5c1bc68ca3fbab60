"""The runner: one plan in, one result out. The same path on every device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tonle.engine.plan import AfterGuesses, Join, Masks, Plan, StepResult
from tonle.engine.request import ResolvedConfig
from tonle.engine.run.batch_rows import Rows
from tonle.engine.run.drafts import DraftedRows, apply_mask
from tonle.engine.run.pooling import Embeddings, RowPools, token_indices
from tonle.engine.sample.sampler import Sampler
from tonle.engine.sample.token_logprobs import RawLogprobs, raw_logprobs, token_logprobs
from tonle.models.adapters.adapter import Adapter, HeldAdapter
from tonle.models.inputs import KVCache, StepInputs


class ForwardModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor: ...
    def forward_hidden(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]: ...
    def set_adapter(self, slot: int, adapter: Any) -> None: ...  # as `Runner.prepare_adapter` gives it


class AdaptersByNumber(Protocol):
    """Where the runner finds the adapters that plans name."""

    def get(self, adapter: int) -> Any: ...  # as `Runner.prepare_adapter` gives it


@dataclass(frozen=True, slots=True)
class DescribedPrompt:
    """A prompt whose log-probabilities are wanted, from the token at `first` on, each with `num_top` alternatives."""

    tokens: list[int]
    num_top: int
    first: int

    @classmethod
    def of(cls, join: Join) -> DescribedPrompt | None:
        config = join.config
        if config.prompt_logprobs is None:
            return None
        return cls(join.prompt, config.prompt_logprobs, max(1, config.prompt_logprobs_start))

    def part(self, start: int, size: int) -> tuple[int, list[int]]:
        """Of the chunk of `size` tokens from `start` on: how many to pass over, and what followed each of the others."""
        passed = max(0, self.first - 1 - start)
        return passed, self.tokens[start + 1 + passed : start + 1 + size]


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. `collect` waits for the device; everything before it is asynchronous where the device is."""

    plan: Plan
    order: list[int]  # plan indices that sample, in the order of `tokens`
    tokens: torch.Tensor  # (S,)
    # Place in `order` -> alternatives wanted beside its log-probability.
    wanted: dict[int, int] = field(default_factory=dict)
    raw: torch.Tensor | None = None  # (wanted, V) their logits
    described: list[tuple[int, list[RawLogprobs]]] = field(default_factory=list)
    # prompt log-probabilities: plan index, those of the tokens that followed the chunk's, piece by piece
    logits: torch.Tensor | None = None  # (S, V) of a step that `draw_bound` samples
    drafted: DraftedRows | None = None
    embeddings: Embeddings | None = None


class Runner:
    """Owns the rows, the sampler and the KV tensors; reads plans, decides nothing.

    `launch`, then `draw_bound` if the plan has bound entries and before anything else is launched, then `collect`.
    """

    adapters: AdaptersByNumber | None = None  # None: the engine takes none, and no plan names one
    sizes: dict[str, list[int]] = {}  # noqa: RUF012  that steps are padded to, as in the step log; empty: to none

    def __init__(self, model: ForwardModel, kv: KVCache, sampler: Sampler, rows: Rows, *, lag: int = 0) -> None:
        self.lag = lag  # steps that may be launched before the first of them is read
        self.profile: dict[str, float] | None = None  # seconds per part, when profiling
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self._prompts: dict[int, DescribedPrompt] = {}  # rows that want prompt log-probabilities
        self._pools = RowPools()

    def checks_drafts(self, config: ResolvedConfig) -> bool:
        """Whether entries of such requests may have drafts."""
        return True

    @property
    def max_entries(self) -> int | None:
        """Of a plan, and drafts, together; None: as many as there are."""
        return None

    @property
    def kernel_changes(self) -> int:
        """How often the model began to compute by other kernels: keys and values of before are rounded differently."""
        return int(getattr(self._model, "kernel_changes", 0))

    def release_memory(self) -> None:
        """The cache holds nothing of worth: its memory is the system's until it is used again. On a CPU."""
        self._kv.release_memory()

    def prepare_adapter(self, adapter: Adapter) -> HeldAdapter:
        """In the form that goes into a slot quickly; called from the thread that reads adapters."""
        return adapter

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        mark = time.perf_counter()
        for slot, adapter in plan.adapter_loads:
            assert self.adapters is not None
            self._model.set_adapter(slot, self.adapters.get(adapter))
        for join in plan.joins:
            self._rows.join(join)
            self._sampler.join(join)
            self._join_prompt(join)
        self._rows.update(plan)
        self._sampler.catch_up(plan)
        # Rows with one token first: attention treats them as one batch.
        order = sorted(range(len(plan.rows)), key=lambda i: (chunk := plan.chunks[i]) is not None and len(chunk) > 1)
        wanted, drafted, described = self._logit_indices(plan, order)
        inputs = self._rows.build(plan, order, wanted)
        mark = self._note("build", mark)
        embeddings = None
        if self._pools.rows:
            logits, embeddings = self._forward_pooled(plan, order, inputs)
        else:
            logits = self._model.forward(inputs, self._kv)  # (S + prompt positions, V)
        mark = self._note("forward", mark)
        launched = self._sample(plan, order, logits, drafted, described)
        launched.embeddings = embeddings
        self._note("sample", mark)
        return launched

    def mask_rows(self, count: int, words: int) -> np.ndarray:
        """Where to write masks (count, words) int32 for the next `draw_bound`."""
        return np.empty((count, words), np.int32)

    @torch.inference_mode()
    def draw_bound(self, launched: LaunchedStep, masks: Masks) -> None:
        """Sample what the step left open."""
        assert launched.logits is not None
        plan, logits = launched.plan, launched.logits
        place_of = {i: place for place, i in enumerate(launched.order)}
        for i, allowed, is_filled in zip(masks.entries, masks.allowed, masks.is_filled, strict=True):
            if is_filled:
                apply_mask(logits[place_of[i]], allowed)
        passed_over = set(plan.bound).difference(masks.entries)
        places = [place for place, i in enumerate(launched.order) if i not in passed_over]
        launched.tokens = torch.zeros(len(launched.order), dtype=torch.int64, device=logits.device)
        if places:
            entries = [launched.order[place] for place in places]
            launched.tokens[places] = self._draw(plan, entries, logits if not passed_over else logits[places])
        self._verify(launched, masks.after)
        launched.logits = None

    def _join_prompt(self, join: Join) -> None:
        """What is wanted of its prompt."""
        self._pools.join(join)
        self._prompts.pop(join.row, None)
        if (described := DescribedPrompt.of(join)) is not None:
            self._prompts[join.row] = described

    def _forward_pooled(
        self, plan: Plan, order: list[int], inputs: StepInputs
    ) -> tuple[torch.Tensor, Embeddings | None]:
        """The logits of the step, and the embeddings of the prompts that end in it."""
        begins = [0] * len(order)
        for place, begin in zip(order, inputs.row_starts, strict=False):  # which has one more
            begins[place] = begin
        wanted = self._pools.wanted(plan, begins)
        if not wanted:
            return self._model.forward(inputs, self._kv), None
        inputs.hidden_indices = torch.tensor(token_indices(wanted), device=inputs.tokens.device)
        logits, states = self._model.forward_hidden(inputs, self._kv)
        for each, own in zip(wanted, states.split_with_sizes([each.count for each in wanted]), strict=True):
            self._pools.add(each.row, own)
        return logits, self._pools.finish(wanted)

    @torch.inference_mode()
    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step and read it back, in the plan's order."""
        values = launched.tokens.tolist()
        result = StepResult(tokens=[token for _, token in sorted(zip(launched.order, values, strict=True))])
        if launched.raw is not None:
            records = token_logprobs(launched.raw, [values[i] for i in launched.wanted], max(launched.wanted.values()))
            for (place, num_top), record in zip(launched.wanted.items(), records, strict=True):
                record.top = record.top[:num_top]
                result.logprobs[launched.order[place]] = record
        if launched.drafted is not None:
            result.more, result.more_logprobs = launched.drafted.more, launched.drafted.more_logprobs
        self._collect_prompts(launched, result)
        return result

    @staticmethod
    def _collect_prompts(launched: LaunchedStep, result: StepResult) -> None:
        """What was wanted of the step's prompts."""
        for i, pieces in launched.described:
            result.prompt_logprobs[i] = [record for piece in pieces for record in piece.records()]
        if launched.embeddings is not None:
            result.pooled = launched.embeddings.as_bytes()

    def _logit_indices(self, plan: Plan, order: list[int]) -> tuple[list[int], dict[int, int], dict[int, slice]]:
        """Indices into the step's tokens: of the last known token of each sampling entry, then of drafts, then of every prompt
        token to be described. And by plan index, where the last two are."""
        last: list[int] = []
        drafts: list[int] = []
        drafted: dict[int, int] = {}
        extra: list[int] = []
        described: dict[int, slice] = {}
        offset = 0
        for i in order:
            chunk = plan.chunks[i]
            size = 1 if chunk is None else len(chunk)
            if plan.samples[i]:
                count = plan.drafts.get(i, 0)
                last.append(offset + size - 1 - count)
                if count:
                    drafted[i] = len(drafts)
                    drafts += range(offset + size - count, offset + size)
            if (prompt := self._prompts.get(plan.rows[i])) is not None:
                passed, targets = prompt.part(plan.starts[i], size)
                if targets:
                    described[i] = slice(len(extra), len(extra) + len(targets))
                    extra += range(offset + passed, offset + passed + len(targets))
            offset += size
        shift = len(last) + len(drafts)
        return last + drafts + extra, drafted, {i: slice(s.start + shift, s.stop + shift) for i, s in described.items()}

    def _sample(
        self,
        plan: Plan,
        order: list[int],
        logits: torch.Tensor,
        drafted: dict[int, int],
        described: dict[int, slice],
    ) -> LaunchedStep:
        sampling = [i for i in order if plan.samples[i]]
        rows = [plan.rows[i] for i in sampling]
        launched = LaunchedStep(plan, sampling, torch.empty(0, dtype=torch.int64))
        for i, place in described.items():
            prompt, chunk = self._prompts[plan.rows[i]], plan.chunks[i]
            _, targets = prompt.part(plan.starts[i], 1 if chunk is None else len(chunk))
            launched.described.append((i, [raw_logprobs(logits[place], targets, prompt.num_top)]))
        if sampling:
            own = logits[: len(sampling)]
            launched.wanted = self._sampler.logprobs_wanted(rows)
            if launched.wanted:
                launched.raw = own[list(launched.wanted)]  # a copy: sampling may change logits
            if drafted:
                launched.drafted = DraftedRows(drafted, logits[len(sampling) :])
            if plan.bound:
                launched.logits = own
            else:
                launched.tokens = self._draw(plan, sampling, own)
                self._verify(launched)
        return launched

    def _verify(self, launched: LaunchedStep, after: AfterGuesses | None = None) -> None:
        """The step's first tokens are drawn: see which of its drafts were right."""
        if (drafted := launched.drafted) is None:
            return
        tokens = dict(zip(launched.order, launched.tokens.tolist(), strict=True))
        drafted.verify(launched.plan, tokens, self._sampler, after)
        plan, ends = launched.plan, {i: more[-1] for i, more in drafted.more.items() if more}
        if ends:
            self._rows.remember([plan.rows[i] for i in ends], torch.tensor(list(ends.values())))

    def _draw(self, plan: Plan, entries: list[int], logits: torch.Tensor) -> torch.Tensor:
        """The next tokens (n,) of these entries of the plan, from their logits (n, V), which may change."""
        rows = [plan.rows[i] for i in entries]
        tokens = self._sampler.sample(logits, rows, [plan.place(i) for i in entries])
        self._rows.remember(rows, tokens)
        return tokens

    def _note(self, part: str, since: float) -> float:
        now = time.perf_counter()
        if self.profile is not None:
            self.profile[part] = self.profile.get(part, 0.0) + now - since
        return now
