"""`DraftModel`: guesses by a second, smaller model with the same tokenizer: the tokens that it finds most likely, one after the
other.

Does: follow the sequences that decode, guess as long as a guess pays, learn from what came. Does not: change an answer; its
guesses are checked as all others are. It computes without adapters, and every sequence from its first token on.
Its cache has the blocks of the engine's cache: block b of a sequence is block b here, so there is one allocator. What it writes
behind a sequence's last token goes to blocks of its own if the sequence has none there yet.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from tonle.engine.plan import Plan
from tonle.engine.speculate.draft_cost import DraftCost
from tonle.engine.speculate.hit_rates import NUM_CLASSES, HitRates, OwnRates
from tonle.engine.speculate.recent_mean import RecentMean
from tonle.models.inputs import KVCache, StepInputs

if TYPE_CHECKING:
    from tonle.engine.schedule.sequence import Sequence

_FIRST_RATE = 0.7  # of guesses that are right, before any was seen
_MAX_CHUNK = 256  # tokens of sequences that it has to catch up with, in all, per step
_MEASURED = 64  # a pass of so many tokens tells what one of them takes
_TRIAL_SHARE = 1 / 16  # of the time since the last guesses, that catching up may take to try guesses again


class DraftDecoder(Protocol):
    """What is needed of a model."""

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor: ...


class _Part(NamedTuple):
    """Tokens of one sequence in one pass."""

    tokens: list[int]
    start: int  # their place in the sequence
    table: list[int]  # its blocks


class Followed:
    """What is known of one sequence."""

    __slots__ = ("at", "blocks", "guesses", "num_computed", "rates")

    def __init__(self, rates: OwnRates) -> None:
        self.rates = rates
        self.blocks: list[int] | None = None  # the list that its tokens were computed in: another one, they are lost
        self.num_computed = 0
        self.guesses: list[int] = []  # of the last time, from the place `at` on
        self.at = 0

    def learn(self, tokens: list[int]) -> None:
        """What came in place of the last guesses."""
        for place, (token, guess) in enumerate(zip(tokens[self.at :], self.guesses, strict=False)):
            self.rates.learn(place, token == guess)
            if token != guess:
                break
        self.guesses = []


class DraftModel:
    """The `Drafter` of a scheduler."""

    def __init__(
        self, decoder: DraftDecoder, kv: KVCache, *, num_blocks: int, max_rows: int, max_tokens: int, max_length: int,
        context_length: int, vocab_size: int, own_vocab_size: int,
    ) -> None:  # fmt: skip
        """`num_blocks`: of the engine's cache. `max_length`: guesses for one sequence in a step. `vocab_size`: of the model whose
        tokens are guessed. `own_vocab_size`: of the decoder. `context_length`: tokens that the decoder can follow."""
        self._decoder = decoder
        self._kv = kv
        self._num_blocks = num_blocks
        self._num_own = own_blocks(max_length, kv.block_size)
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._own_vocab_size = own_vocab_size
        self._max_tokens = max_tokens
        self._rates = HitRates((_FIRST_RATE,) * NUM_CLASSES)
        self._cost = DraftCost(max_rows, max_tokens)
        self._least_chance, self._num_left = 1.0, 0
        self._is_trial = False  # the step that is planned, whose guesses are made to learn from
        self._pass_s = RecentMean()  # per token of a pass of single tokens
        self._catch_up_s = RecentMean()  # per token of a pass of many
        self._token_s = 0.0  # what a token is worth in the step that is planned
        self._spent_s = 0.0  # in the step that is planned
        self._without_s = 0.0  # since the last step with guesses

    def begin_step(self, plan: Plan) -> bool:
        self._spent_s = 0.0
        if plan.prompts:
            return False
        rows, reads = len(plan.rows), sum(plan.starts)
        self._least_chance, most, self._is_trial = self._cost.worth(rows, reads, self._pass_s.value)
        self._num_left = self._max_tokens if most is None else most
        self._token_s = self._cost.token_s(rows, reads)
        return self._least_chance < 1.0

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        began = time.perf_counter()
        found: list[list[int]] = [[] for _ in wanted]
        owns = [self._follow(sequence) for sequence, _ in wanted]
        parts, counts = self._first_parts(wanted, owns)
        while parts:
            drawn = self._pass(list(parts.values()))
            following = {}
            for (n, part), token in zip(parts.items(), drawn, strict=True):
                if n in counts:
                    found[n].append(token)
                    if len(found[n]) < counts[n]:
                        following[n] = _Part([token], part.start + len(part.tokens), part.table)
            parts = following
        for n, (sequence, _) in enumerate(wanted):
            owns[n].at, owns[n].guesses = len(sequence.tokens), found[n]
        self._spent_s += time.perf_counter() - began
        return found

    def _first_parts(
        self, wanted: list[tuple[Sequence, int]], owns: list[Followed]
    ) -> tuple[dict[int, _Part], dict[int, int]]:
        """By place in `wanted`: what is computed of each first, and of those that are computed up to their last token then, how
        many guesses are made."""
        parts: dict[int, _Part] = {}
        counts: dict[int, int] = {}
        left = _MAX_CHUNK
        # Those with the fewest tokens to compute come first: one that has to catch up with a long prompt holds up no other.
        for n in sorted(range(len(wanted)), key=lambda n: len(wanted[n][0].tokens) - owns[n].num_computed):
            (sequence, most), own = wanted[n], owns[n]
            start = own.num_computed
            behind = len(sequence.tokens) - 1 - start
            num_remaining = sequence.max_tokens - len(sequence.tokens) - behind // _MAX_CHUNK
            count, saved_s = self._num_to_guess(own, most, num_remaining)
            count = min(count, num_remaining, self._context_length - len(sequence.tokens))
            if count <= 0 or left == 0 or not self._may_catch_up(behind, saved_s):
                continue
            tokens = sequence.tokens[start : start + left]
            left -= len(tokens)
            parts[n] = _Part(tokens, start, self._table(sequence))
            own.num_computed += len(tokens)
            if own.num_computed == len(sequence.tokens):  # else it catches up in the next steps
                counts[n] = count
                self._num_left -= count
        return parts, counts

    def _follow(self, sequence: Sequence) -> Followed:
        own: Followed | None = sequence.own_text
        if own is None:
            own = sequence.own_text = Followed(OwnRates(self._rates))
        elif own.guesses:
            own.learn(sequence.tokens)
        if own.blocks is not sequence.blocks:
            own.blocks, own.num_computed = sequence.blocks, 0
        own.num_computed = min(own.num_computed, len(sequence.tokens) - 1)  # the last one's successor is wanted
        return own

    def _num_to_guess(self, own: Followed, most: int, num_remaining: int) -> tuple[int, float]:
        """And the seconds that as many in each step are expected to save, over `num_remaining` tokens."""
        count, chance, expected, gain = 0, 1.0, 0.0, 0.0
        for place in range(min(most, self._num_left)):
            chance *= own.rates.rate(place)
            if chance < self._least_chance:
                break
            count += 1
            expected += chance
            gain += chance - self._least_chance  # in tokens
        saved_s = gain * self._token_s * num_remaining / (1 + expected)
        # Only what is guessed is learnt from: without a guess in a trial, bad luck would last.
        return max(count, int(self._is_trial and min(most, self._num_left) > 0)), saved_s

    def _may_catch_up(self, num_tokens: int, saved_s: float) -> bool:
        """Whether to compute so many tokens, for guesses that are expected to save `saved_s`."""
        takes_s = num_tokens * self._catch_up_s.value
        if self._is_trial:
            return num_tokens < _MAX_CHUNK or takes_s <= _TRIAL_SHARE * self._without_s
        return takes_s <= saved_s

    def _table(self, sequence: Sequence) -> list[int]:
        assert sequence.row is not None
        first = self._num_blocks + sequence.row * self._num_own
        return sequence.blocks + list(range(first, first + self._num_own))

    def _pass(self, parts: list[_Part]) -> list[int]:
        """The most likely token after each part."""
        began = time.perf_counter()
        order = sorted(range(len(parts)), key=lambda n: len(parts[n].tokens) > 1)  # rows with one token come first
        inputs = _inputs([parts[n] for n in order], self._kv.block_size)
        # Models of one tokenizer may have different numbers of ids beyond its own, as padding. Such a token of the large model
        # is only context here, and any other one does in its place.
        inputs.tokens.clamp_(max=self._own_vocab_size - 1)
        logits = self._decoder.forward(inputs, self._kv)
        best = logits[:, : self._vocab_size].argmax(dim=-1).tolist()
        num_tokens = len(inputs.tokens)
        if num_tokens == len(parts):
            self._pass_s.add((time.perf_counter() - began) / num_tokens)
        elif num_tokens >= _MEASURED:
            self._catch_up_s.add((time.perf_counter() - began) / num_tokens)
        drawn = dict(zip(order, best, strict=True))
        return [drawn[n] for n in range(len(parts))]

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        self._without_s = 0.0 if plan.drafts else self._without_s + seconds
        if not plan.prompts:
            self._cost.learn(plan, seconds - self._spent_s)
        self._spent_s = 0.0  # a step that is full does not ask

    def ended(self, sequence: Sequence) -> None:
        sequence.own_text = None

    def forget_texts(self) -> None:
        """It keeps none."""

    def release_memory(self) -> None:
        self._kv.release_memory()


def own_blocks(max_length: int, block_size: int) -> int:
    """Blocks that each row has behind those of its sequence, for guesses."""
    return -(-max_length // block_size) + 1


def _inputs(parts: list[_Part], block_size: int) -> StepInputs:
    """Of one pass. The logits of the last token of each part are wanted."""
    sizes = np.array([len(part.tokens) for part in parts])
    starts = np.array([part.start for part in parts])
    row_starts = np.concatenate(([0], np.cumsum(sizes)))  # (R + 1,)
    row_of = np.repeat(np.arange(len(parts)), sizes)  # (T,)
    positions = np.arange(row_starts[-1]) - row_starts[row_of] + starts[row_of]
    context = starts + sizes
    width = -(-int(context.max()) // block_size)
    tables = np.zeros((len(parts), width), dtype=np.int32)
    for row, part in enumerate(parts):
        table = part.table[:width]
        tables[row, : len(table)] = table
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepInputs(
        tokens=torch.tensor([token for part in parts for token in part.tokens], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        row_starts=row_starts.tolist(),
        context_lens=context.tolist(),
        block_tables=torch.from_numpy(tables),
        num_decode=int((sizes == 1).sum()),
        logit_indices=torch.from_numpy(row_starts[1:] - 1),
    )
