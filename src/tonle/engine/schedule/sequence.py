"""One sequence on its way: what is known of it and how far it is computed."""

from __future__ import annotations

from typing import Any

from tonle.engine.constraint import Constraint
from tonle.engine.kv.block_pool import block_digests, root_digest
from tonle.engine.request import Request
from tonle.engine.schedule.sequence_notes import SequenceNotes


class Sequence:
    """Progress is a number: `num_computed` catches up with `num_known`. There is no prefill or decode mode."""

    __slots__ = ("_digests", "blocks", "constraint", "done", "is_late", "key", "max_tokens", "may_load", "notes", "num_accepted",
                 "num_cached", "num_computed", "num_drafted", "num_forced", "num_loaded", "num_named", "num_pending",
                 "num_suspected", "num_unsent", "own_text", "pooling", "request", "row", "started", "stops",
                 "tokens", "waits")  # fmt: skip

    def __init__(
        self, request: Request, *, key: float, stops: frozenset[int], constraint: Constraint | None = None
    ) -> None:
        self.request = request
        self.constraint = constraint  # of its output; None: any tokens. It has been told all of `tokens`
        self.key = key  # smaller runs earlier
        self.stops = stops  # token ids that end it
        self.tokens = list(request.prompt)  # prompt + output whose values we have
        self.pooling = request.pooling  # not empty: it ends when its prompt is computed,
        # which counts as a token that is on its way
        self.max_tokens = len(request.prompt) + (1 if self.pooling else request.config.max_length)
        self.num_pending = 0  # sampled on the device at a place that is not known, and not read yet
        # Of its output, forced before its first step: the caller gets them with the first that is drawn.
        self.num_unsent = 0
        self.num_forced = 0  # of its output: no step drew them
        self.num_drafted = 0  # draft tokens that steps computed for it,
        self.num_accepted = 0  # and those that became tokens of its output
        self.own_text: Any = None  # what the drafter knows of it
        self.num_computed = 0  # tokens whose keys and values are in the cache (or in a launched step)
        self.num_cached = 0  # prompt tokens found in the prefix cache, or loaded, when it first ran
        self.may_load = True  # it was not asked yet whether its prefix can come from elsewhere
        self.num_loaded = 0  # of `num_computed` when it first ran: came from elsewhere (`loading.py`)
        self.blocks: list[int] = []
        self.num_named = 0  # its first so many blocks are found or published under their digests
        self._digests: list[bytes] = []  # of its full blocks, as far as they were asked for
        self.row: int | None = None  # its place in the batch, while running
        self.started = False
        self.done = False
        self.is_late = False  # its mask is still being filled: it is left out of steps
        self.waits = (
            False  # it is left out of steps as long as one that it is in has not been read: guesses depend on that
        )
        self.num_suspected = 0  # steps that failed with it among others
        self.notes: SequenceNotes | None = None  # of where its time goes, if that is noted

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def complete(self) -> bool:
        """Its last token has been sampled, though perhaps not read yet."""
        return len(self.tokens) + self.num_pending >= self.max_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """Of its first `count` blocks at least; their tokens must be known. Kept: a long prompt that waits is looked up in every
        step."""
        digests = self._digests
        if (have := len(digests)) < count:
            request = self.request
            parent = digests[-1] if digests else root_digest(request.salt, adapted=request.adapter != 0)
            digests += block_digests(parent, self.tokens[have * block_size : count * block_size], block_size)
        return digests

    def rewind(self) -> list[int]:
        """Forget everything computed (preemption by recompute). Returns the blocks to release."""
        blocks, self.blocks = self.blocks, []
        self.num_named = 0
        self.num_computed = 0
        self.row = None
        return blocks
