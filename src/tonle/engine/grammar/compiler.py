"""`GrammarCompiler`: grammars to constraints, on a thread beside the engine's loop.

Does: compile each grammar once, keep what was compiled per tenant, fill masks of many sequences at once, say in words for the
caller why a grammar cannot be used. Does not: write grammars (`grammar_text.py`), or drive sequences.

The loop's thread owns everything but the jobs: it asks, looks into the cache, and puts into it what the other thread compiled.
llguidance drops the interpreter's lock while it compiles, so that steps go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from tonle.config.cores import num_cores
from tonle.engine.constraint import Compiled, Constraint
from tonle.engine.grammar.json_schema import where_it_fails
from tonle.engine.grammar.limits import MAX_FORCED_TOKENS
from tonle.engine.grammar.mask_filler import MaskFiller
from tonle.engine.grammar.matcher import GrammarConstraint, Pace, in_words
from tonle.engine.grammar.tenant_queue import Key, TenantQueue
from tonle.engine.grammar.thinking import ThinkingConstraint
from tonle.engine.grammar.vocabulary import make_vocabulary
from tonle.engine.request import Request
from tonle.engine.text import Text
from tonle.errors import CallerError

log = logging.getLogger("tonle.engine")

_MAX_CACHED = 256  # compiled grammars; one takes from some tens of KB to a few MB
_MAX_CACHED_BYTES = 8 << 20  # of their texts, which is a measure of the rest
# llguidance walks a grammar by recursion: a chain of some thousand references needs more than the usual 8 MiB, and without them
# the process would die. Measured: the longest chain that `limits.MAX_BYTES` has room for needs less than 100 MiB. Memory is
# taken as it is used.
_STACK_BYTES = 512 << 20
_MOST_FILLERS = 4  # threads that fill masks which others must not wait for
_SIDE_BY_SIDE = 4  # masks, from which on a pool of threads fills them sooner than the loop's own
_SLOW_FILL_S = 0.01  # of a pool. Then the next masks are filled one by one: that tells which of them take so long
_ONE_BY_ONE = 8  # steps
# The limits keep all grammars that we know of below 2 s. One that does not end is left to its thread, and another thread goes on.
_MAX_COMPILE_S = 10.0
_MAX_LEFT = 4  # such threads; then only grammars that are compiled already are taken


def parser_limits() -> LLParserLimits:
    """Bounds on what one grammar may cost, while it is compiled and per token. Beyond them a request ends with the reason."""
    return LLParserLimits(
        initial_lexer_fuel=300_000,  # at most some 300 ms of building regular expressions; an enum of 256 KiB takes half of it
        step_lexer_fuel=100_000,  # some 7 ms in one step, which no other row may wait for longer
        step_max_items=20_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,  # 1 to 2 KB each
        max_grammar_size=200_000,  # symbols: some half a second
        verbose_errors=False,  # a message names no text of the sequence or the grammar that goes into logs
    )


@dataclass(slots=True)
class _Done:
    key: Key
    matcher: LLMatcher | None
    error: str = ""
    pace: Pace = field(default_factory=Pace)


class _Worker:
    """A thread that compiles, one grammar after the other."""

    def __init__(self, run: Callable[[_Worker], None]) -> None:
        self.key: Key | None = None  # under way, since `began_s`
        self.began_s = 0.0
        self.is_left = False  # it ends when it is done with this one
        self.thread = _started(lambda: run(self))

    @property
    def is_late(self) -> bool:
        return self.key is not None and time.monotonic() - self.began_s > _MAX_COMPILE_S


class GrammarCompiler:
    """Used by the loop's thread alone. `text` gives the model's text side, on the compiler's thread."""

    def __init__(self, text: Callable[[], Text], vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.mask_words = -(-vocab_size // 32)
        self._text = text
        self._vocab_size = vocab_size
        self._ends = frozenset(eos_ids)
        self._cache: OrderedDict[Key, _Done] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[Key, list[Request]] = {}  # each key once: identical grammars compile once
        self._ready: list[Compiled] = []
        self._jobs = TenantQueue()
        self._finished: deque[_Done] = deque()
        num_threads = min(num_cores() - 1, 8)
        self._pool = LLExecutor(num_threads) if num_threads > 1 else None
        self._filler = MaskFiller(self.mask_words, min(max(1, num_cores() - 1), _MOST_FILLERS), _fill_each)
        self._vocabulary: LLTokenizer | None = None  # made by the first worker
        self._problem = ""  # why there is none
        self._one_by_one = 0  # steps
        self._num_left = 0
        self._worker = _Worker(self._run)

    # -- on the loop's thread

    def ask(self, request: Request) -> None:
        if not request.grammar:  # a budget for thinking alone
            self._ready.append(Compiled(request, _constraint(request, None)))
            return
        key = (request.salt, request.grammar)
        if (done := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._ready.append(self._compiled(request, done))
        elif key in self._waiting:
            self._waiting[key].append(request)
        elif self._num_left >= _MAX_LEFT:
            self._ready.append(Compiled(request, None, _STUCK))
        else:
            self._waiting[key] = [request]
            self._jobs.put(key)

    def forget(self, handle: int) -> None:
        """A grammar that is only asked for by those that are gone is not compiled, unless that has begun; then it is kept."""
        self._ready = [compiled for compiled in self._ready if compiled.request.handle != handle]
        for key, requests in list(self._waiting.items()):
            kept = [request for request in requests if request.handle != handle]
            if len(kept) < len(requests):
                requests[:] = kept
                if not kept and self._jobs.discard(key):
                    del self._waiting[key]

    def take(self) -> list[Compiled]:
        if self._worker.is_late:
            self._leave_worker()
        while self._finished:
            done = self._finished.popleft()
            if (requests := self._waiting.pop(done.key, None)) is not None:  # else it was given up
                self._keep(done)
                self._ready += [self._compiled(request, done) for request in requests]
        ready, self._ready = self._ready, []
        return ready

    @property
    def is_busy(self) -> bool:
        return bool(self._ready) or any(self._waiting.values())

    def fill(self, constraints: list[Constraint], masks: np.ndarray, wait_s: float | None = None) -> list[bool | None]:
        if wait_s is None and not any(map(self._filler.holds, constraints)):
            return [*self._fill_now(constraints, masks)]
        filled: list[bool | None] = [None] * len(constraints)
        others = [i for i, each in enumerate(constraints) if not _is_quick(each) or self._filler.holds(each)]
        jobs = self._filler.start([constraints[i] for i in others])
        for i in set(range(len(constraints))).difference(others):  # meanwhile
            filled[i] = constraints[i].fill(masks[i])
        for i, is_filled in zip(others, self._filler.take(jobs, [masks[i] for i in others], wait_s), strict=True):
            filled[i] = is_filled
        return filled

    def is_late(self, constraint: Constraint) -> bool:
        return self._filler.is_late(constraint)

    def drop_mask(self, constraint: Constraint) -> None:
        self._filler.drop(constraint)

    def _fill_now(self, constraints: list[Constraint], masks: np.ndarray) -> list[bool]:
        whole = [_matcher(constraint) for constraint in constraints]
        if self._pool is None or self._one_by_one or len(constraints) - whole.count(None) < _SIDE_BY_SIDE:
            self._one_by_one = max(0, self._one_by_one - 1)
            return [constraint.fill(mask) for constraint, mask in zip(constraints, masks, strict=True)]
        filled = [
            matcher is not None or constraint.fill(masks[row])
            for row, (constraint, matcher) in enumerate(zip(constraints, whole, strict=True))
        ]
        jobs = [(matcher, row) for row, matcher in enumerate(whole) if matcher is not None]
        began = time.monotonic()
        self._pool.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.strides[0], len(masks))
        if time.monotonic() - began > _SLOW_FILL_S:
            self._one_by_one = _ONE_BY_ONE
        return filled

    def close(self) -> None:
        """Waits for what is being compiled, not for what comes after it."""
        self._filler.close()
        self._jobs.close()
        self._worker.thread.join(_MAX_COMPILE_S)

    def _leave_worker(self) -> None:
        """What it compiles does not end: a thread cannot be stopped, so another one takes its place."""
        if (key := self._worker.key) is None:
            return  # it ended just now
        log.error("a grammar of %d bytes is not compiled after %.0f s, and given up", len(key[1]), _MAX_COMPILE_S)
        self._worker.is_left = True
        self._finished.append(_Done(key, None, _TOO_LONG))
        self._num_left += 1
        self._worker = _Worker(self._run)

    def _compiled(self, request: Request, done: _Done) -> Compiled:
        if done.matcher is None:
            return Compiled(request, None, done.error)
        return Compiled(
            request, _constraint(request, GrammarConstraint(done.matcher.deep_copy(), self._ends, done.pace))
        )

    def _keep(self, done: _Done) -> None:
        """Mistakes, too: a caller that repeats one learns it at once."""
        self._cache[done.key] = done
        self._cached_bytes += len(done.key[1])
        while len(self._cache) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
            (_, grammar), _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(grammar)

    # -- on the compiler's thread

    def _run(self, worker: _Worker) -> None:
        if self._vocabulary is None and not self._problem:
            self._make_vocabulary()
        while not worker.is_left and (key := self._jobs.get()) is not None:
            if self._vocabulary is None:
                self._finished.append(_Done(key, None, self._problem))
            else:
                worker.began_s, worker.key = time.monotonic(), key
                done = _compile(key, self._vocabulary)
                worker.key = None
                self._finished.append(done)

    def _make_vocabulary(self) -> None:
        began = time.monotonic()
        try:
            self._vocabulary = make_vocabulary(self._text(), self._vocab_size, self._ends)
        except CallerError as error:
            self._problem = error.message
        except Exception:
            log.exception("the vocabulary for structured output could not be made")
            self._problem = "this engine cannot do structured output; its log says why"
        log.debug("the vocabulary for structured output took %.2f s", time.monotonic() - began)


def _compile(key: Key, vocabulary: LLTokenizer) -> _Done:
    try:
        matcher = LLMatcher(vocabulary, key[1], log_level=0, limits=parser_limits())
        if not matcher.is_error():
            num_forced = len(matcher.compute_ff_tokens())
            if num_forced > MAX_FORCED_TOKENS:
                return _Done(key, None, _ENDLESS.format(num_forced))
            matcher.compute_bitmask()  # some mistakes show here
        if matcher.is_error():
            return _Done(key, None, _reason(key[1], vocabulary, matcher.get_error()))
    except (
        BaseException
    ) as error:  # llguidance raises none for a grammar's sake; and the thread must go on, after a panic too
        log.exception("a grammar of %d bytes could not be compiled", len(key[1]))
        return _Done(key, None, f"the grammar could not be compiled ({type(error).__name__})")
    return _Done(key, matcher)


def _reason(grammar: str, vocabulary: LLTokenizer, error: str) -> str:
    """In words for the caller, with the place in a schema."""

    def error_of(part: str) -> str:
        return LLMatcher(vocabulary, part, log_level=0, limits=parser_limits()).get_error()

    place = where_it_fails(grammar, error_of, error)
    if error.startswith("oneOf constraints are not supported"):
        error = (
            "oneOf is supported where no value can fit two of its branches: where they differ in type, or in the const of a "
            "property; use anyOf"
        )
    if place is None:
        return f"the grammar cannot be used: {in_words(error)}"
    return f"the JSON schema cannot be used, because of what is at {place}: {in_words(error)}"


_TOO_LONG = "the grammar cannot be used: it takes too long to compile; make it smaller, or its patterns simpler"
_STUCK = "no new grammars are compiled, as earlier ones did not end; ask the operator to restart the engine"
_ENDLESS = (
    "the grammar cannot be used: its beginning leaves no choice about {} tokens and more, so that an answer would not end; does "
    "a required property lead back to itself?"
)


def _constraint(request: Request, answer: GrammarConstraint | None) -> Constraint:
    thinking = request.config.thinking
    if thinking is not None:
        return ThinkingConstraint(thinking, answer)
    assert answer is not None, "asked for nothing"
    return answer


def _grammar(constraint: Constraint) -> GrammarConstraint | None:
    """The one whose mask is all of the constraint's."""
    bound = constraint.binds_now if isinstance(constraint, ThinkingConstraint) else constraint
    return bound if isinstance(bound, GrammarConstraint) else None


def _matcher(constraint: Constraint) -> LLMatcher | None:
    return None if (grammar := _grammar(constraint)) is None else grammar.matcher


def _is_quick(constraint: Constraint) -> bool:
    """The loop's own thread fills its mask sooner than another one could."""
    return (grammar := _grammar(constraint)) is None or grammar.pace.is_quick


def _fill_each(constraints: list[Constraint], masks: np.ndarray) -> list[bool]:
    """One by one, which tells how long each takes."""
    return [constraint.fill(mask) for constraint, mask in zip(constraints, masks, strict=True)]


def _started(run: Callable[[], None]) -> threading.Thread:
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="tonle-grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
