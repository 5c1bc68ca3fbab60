"""An index built from KV events alone is the engine's own, after each of ten thousand random steps."""

from __future__ import annotations

import random

import msgspec

from tonle.engine.kv.block_pool import BlockPool, block_digests, root_digest
from tonle.engine.kv.kv_events import Event, KvEvents, encode
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits

STEPS = 10_000
BLOCK = 4
SALTS = (b"", b"tenant")


class Index:
    """What a router outside knows: a publisher whose batches arrive at once, unless one is lost."""

    def __init__(self, rng: random.Random) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}  # parent, tokens
        self.is_behind = False
        self._rng = rng

    def put(self, ts: float, events: list[Event]) -> bool:
        self.is_behind = self._rng.random() < 0.01
        if not self.is_behind:
            for event in msgspec.msgpack.decode(encode(ts, events, "array"))[1]:
                self._apply(*event)
        return not self.is_behind

    def _apply(self, name: str, hashes: list[bytes] = [], *rest: object) -> None:  # noqa: B006
        match name, rest:
            case "BlockStored", (parent, tokens, block_size, *_):
                assert block_size == BLOCK and len(tokens) == BLOCK * len(hashes)
                for i, each in enumerate(hashes):
                    assert each not in self.blocks, "it is stored twice"
                    self.blocks[each] = (parent, tokens[i * BLOCK : (i + 1) * BLOCK])
                    parent = each
            case "BlockRemoved", _:
                for each in hashes:
                    self.blocks.pop(each, None)  # it may be from before a batch that was lost
            case "AllBlocksCleared", _:
                self.blocks.clear()

    def close(self) -> None:
        pass


def test_an_index_from_events_is_the_engines_own() -> None:
    rng = random.Random(11)
    limits = SchedulerLimits(
        max_num_seqs=6, max_num_batched_tokens=32, context_length=80, block_size=BLOCK, long_prefill_tokens=16
    )
    pool = BlockPool(50)
    scheduler, index = Scheduler(limits, pool, [0]), Index(rng)
    pool.observer = events = KvEvents(index, BLOCK, str)
    flights: list[Plan] = []
    handle = num_cleared = most = 0
    missing: set[bytes] = set()  # published before a batch that was lost: known to be there, but not to the index
    for step in range(STEPS):
        if len(scheduler.waiting) < 4 and rng.random() < 0.4:
            handle += 1
            scheduler.add(_request(rng, handle, float(step)))
        if rng.random() < 0.02:
            scheduler.cancel(rng.randint(max(1, handle - 8), handle + 1))
        if rng.random() < 0.005 and not flights:
            scheduler.recompute()
        elif rng.random() < 0.01:
            pool.drop_idle(keep=rng.choice([0, 0, 3]))
        plan = scheduler.plan(float(step))
        if plan.rows and rng.random() < 0.01:
            scheduler.suspect([plan, *flights])
            flights.clear()
        elif plan.rows:
            flights.append(plan)
        while len(flights) > (1 if plan.rows else 0):
            first = flights.pop(0)
            scheduler.commit(first, StepResult([rng.choice([0, 1, 2, 2, 3]) for _ in range(sum(first.samples))]))
        events.flush()
        if index.is_behind:
            missing, index.is_behind = pool.published, False
            index.blocks.clear()  # as its next batch will tell it to
            continue
        missing &= pool.published - set(index.blocks)
        assert set(index.blocks) == pool.published - missing, f"step {step}"
        num_cleared += not pool.published
        most = max(most, len(index.blocks))
    assert most > 30 and num_cleared > 3 and events.num_lost > 10 and scheduler.num_preemptions > 10
    _check_digests(index)


def _check_digests(index: Index) -> None:
    """Whoever knows the salt computes the same digests from what the events say."""
    roots = [root_digest(salt) for salt in SALTS]
    for digest, (parent, tokens) in index.blocks.items():
        parents = roots if parent is None else [parent]
        assert digest in [block_digests(each, tokens, BLOCK)[0] for each in parents]


def _request(rng: random.Random, handle: int, now: float) -> Request:
    shared = [1, 2, 3, 4] * 10
    size = rng.randint(1, 60)
    prompt = shared[: min(size, rng.choice([0, 8, 16, 40]))]
    prompt += [rng.randint(1, 4) for _ in range(size - len(prompt))]
    return Request(handle=handle, prompt=prompt, config=ResolvedConfig(max_length=rng.randint(1, 20)), arrived_s=now,
                   salt=rng.choice(SALTS), priority=rng.randint(0, 3))  # fmt: skip
