"""KeyLimits that several gateways share, at the seam: two limiters, each with connections of its own, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.stores import Store
from tests.gateway.running_gateway import run
from tonle.errors import StoreLost
from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.limits.limiter import Lease, refusal
from tonle.gateway.limits.memory_limiter import MemoryLimiter
from tonle.gateway.limits.shared_counts import Held, Settlement, SharedCounts
from tonle.gateway.limits.shared_limiter import SharedLease, SharedLimiter
from tonle.gateway.refusals import RateLimited
from tonle.gateway.state_store import state_of

PATIENT_S = 120.0
NEVER_S = 3600.0  # a lease that does not run out while a test runs


@contextlib.asynccontextmanager
async def counts(store: Store, *, timeout_s: float = PATIENT_S) -> AsyncIterator[SharedCounts]:
    """`timeout_s`: once it is open, which may take longer."""
    state: Any = state_of(store.url, timeout_s=PATIENT_S)
    await state.open()
    (state._client if hasattr(state, "_client") else state._server)._timeout_s = timeout_s
    assert state.counts is not None
    yield state.counts
    await state.close()


@contextlib.asynccontextmanager
async def limiter(store: Store, *, lease_s: float = NEVER_S) -> AsyncIterator[SharedLimiter]:
    async with counts(store) as on_server:
        shared = SharedLimiter(on_server, KeyLimits(), lease_s=lease_s, serve_when_lost=False)
        await shared.start()
        yield shared
        await shared.stop()


def key(name: str = "k", **limits: int) -> Key:
    return Key(id=name, name="", digest="", created=0, limits=KeyLimits(**limits))


async def tried(limiters: list[SharedLimiter], limited: Key, times: int, tokens: int = 1) -> list[Lease]:
    """At once, in turn through each of the limiters: the leases that were granted."""
    charges = [limiters[index % len(limiters)].charge(limited, tokens) for index in range(times)]
    results = await asyncio.gather(*charges, return_exceptions=True)
    assert all(isinstance(result, SharedLease | RateLimited) for result in results), results
    return [result for result in results if isinstance(result, SharedLease)]


def test_requests_at_once_are_counted_across_gateways(store: Store) -> None:
    async def main() -> None:
        async with limiter(store) as one, limiter(store) as two:
            limited = key(max_concurrent=5)
            granted = await tried([one, two], limited, 40)
            assert len(granted) == 5
            for lease in granted[:2]:
                lease.settle(3)
            # Each gateway's own settlements are heard before it charges again; wait for those of the other.
            await asyncio.gather(one.settlements.ended("k"), two.settlements.ended("k"))
            assert len(await tried([one, two], limited, 40)) == 2

    run(main())


@pytest.mark.parametrize(("limit", "tokens"), [({"requests_per_minute": 20}, 1), ({"tokens_per_minute": 200}, 10)])
def test_rates_hold_across_gateways(store: Store, limit: dict[str, int], tokens: int) -> None:
    async def main() -> None:
        async with limiter(store) as one, limiter(store) as two:
            began_s = time.monotonic()
            granted = await tried([one, two], key(**limit), 60, tokens)
            refilled = (time.monotonic() - began_s) * 20 / 60
            assert 20 <= len(granted) <= min(60, 20 + refilled)

    run(main())


def test_tokens_of_a_day_are_counted_across_gateways_and_those_of_running_requests_too(store: Store) -> None:
    async def main() -> None:
        async with limiter(store) as one, limiter(store) as two:
            limited = key(tokens_per_day=100)
            running = await one.charge(limited, 60)
            other = await two.charge(limited, 60)  # 60 of 100 are spoken for
            with pytest.raises(RateLimited, match="per day") as soon:
                await one.charge(limited, 1)
            assert soon.value.retry_after_s == 1  # they may turn out to use less
            running.settle(10)
            other.settle(10)
            await asyncio.gather(one.settlements.ended("k"), two.settlements.ended("k"))
            assert await one.used_today(["k", "other"]) in ({"k": 20}, {"k": 20, "other": 0})
            (await two.charge(limited, 1)).settle(90)
            await two.settlements.ended("k")
            with pytest.raises(RateLimited, match="per day"):
                await one.charge(limited, 1)
            assert (await two.used_today(["k"]))["k"] == 110

    run(main())


def test_a_refused_request_costs_nothing_and_settling_corrects(store: Store) -> None:
    async def main() -> None:
        async with counts(store) as on_server:
            limits = KeyLimits(requests_per_minute=1000, tokens_per_minute=100)

            async def charge(name: str, tokens: int) -> str | None:
                over = await on_server.charge(Held(name, "k", tokens), limits, lease_s=NEVER_S)
                return over.name if over is not None else None

            assert await charge("a", 100) is None
            assert [await charge(f"b{index}", 90) for index in range(5)] == ["tokens_per_minute"] * 5
            await on_server.settle([Settlement("k", 10, Held("a", "k", 100))])  # 90 come back
            assert await charge("c", 90) is None
            await on_server.settle([Settlement("k", 190, Held("c", "k", 90))])  # overdrawn by 100
            over = await on_server.charge(Held("d", "k", 1), limits, lease_s=NEVER_S)
            assert over is not None and 0 < over.wait_s <= 61

    run(main())


def test_what_is_sent_twice_counts_once(store: Store) -> None:
    async def main() -> None:
        async with counts(store) as on_server:
            limits = KeyLimits(requests_per_minute=2, max_concurrent=2)
            held = Held("same", "k", 5)
            assert [await on_server.charge(held, limits, lease_s=NEVER_S) for _ in range(4)] == [None] * 4
            assert await on_server.charge(Held("other", "k", 5), limits, lease_s=NEVER_S) is None
            await on_server.settle([Settlement("k", 0, Held("never charged", "k", 50))])
            assert (await on_server.used_today(["k"])).get("k", 0) == 0
            over = await on_server.charge(Held("third", "k", 5), limits, lease_s=NEVER_S)
            assert over is not None and over.name == "max_concurrent"

    run(main())


def test_a_lease_nobody_renews_runs_out_and_counts_as_used(store: Store) -> None:
    async def main() -> None:
        async with counts(store) as on_server:
            limits = KeyLimits(max_concurrent=1)
            assert await on_server.charge(Held("dead", "k", 40), limits, lease_s=0.05) is None
            await asyncio.sleep(0.1)
            assert await on_server.charge(Held("next", "k", 1), limits, lease_s=NEVER_S) is None
            assert await on_server.used_today(["k"]) == {"k": 40}
            over = await on_server.charge(Held("third", "k", 1), limits, lease_s=NEVER_S)
            assert over is not None and over.name == "max_concurrent"
            # Its gateway was not dead but away: it is back, and counts again.
            await on_server.settle([Settlement("k", 0, Held("next", "k", 1))])
            await on_server.renew([Held("dead", "k", 40)], lease_s=NEVER_S)
            over = await on_server.charge(Held("fourth", "k", 1), limits, lease_s=NEVER_S)
            assert over is not None and over.name == "max_concurrent"

    run(main())


def test_a_gateway_renews_what_runs(store: Store) -> None:
    async def main() -> None:
        async with limiter(store, lease_s=1.5) as one, limiter(store) as two:
            limited = key(max_concurrent=1)
            running = await one.charge(limited, 1)
            renewed = asyncio.Event()
            renew = one._counts.renew

            async def seen(held: list[Held], *, lease_s: float) -> None:
                await renew(held, lease_s=NEVER_S)  # once is enough: a slow machine may come late to the next
                renewed.set()

            one._counts.renew = seen  # type: ignore[method-assign, assignment]
            await renewed.wait()
            await asyncio.sleep(1.6)  # the first lease has run out
            with pytest.raises(RateLimited):
                await two.charge(limited, 1)
            running.settle(1)
            await one.settlements.ended("k")
            (await two.charge(limited, 1)).settle(1)

    run(main())


def test_a_caller_who_hangs_up_while_being_charged_holds_nothing(store: Store) -> None:
    async def main() -> None:
        async with limiter(store) as one, limiter(store) as two:
            limited = key(max_concurrent=1)
            await two.used_today(["k"])
            store.freeze()
            charge = asyncio.create_task(one.charge(limited, 1))
            await asyncio.sleep(0.1)
            charge.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await charge
            assert charge.cancelled()
            store.thaw()
            for _ in range(600):
                with contextlib.suppress(RateLimited):
                    (await two.charge(limited, 1)).settle(1)
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("its slot is gone")

    run(main())


def test_a_key_without_limits_needs_no_trip(store: Store) -> None:
    async def main() -> None:
        async with limiter(store) as one:
            store.freeze()
            lease = await one.charge(key(), 10)
            store.thaw()
            lease.settle(7)
        async with limiter(store) as two:
            assert await two.used_today(["k"]) == {"k": 7}

    run(main())


def test_a_server_that_says_nothing_is_lost_and_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.gateway.limits.shared_limiter.RETRY_S", 0.05)

    async def main() -> None:
        async with counts(store) as patient, counts(store, timeout_s=0.3) as hasty:
            shared = SharedLimiter(hasty, KeyLimits(), lease_s=NEVER_S, serve_when_lost=False)
            store.freeze()
            for _ in range(2):
                with pytest.raises(StoreLost, match="cannot be reached"):
                    await shared.charge(key(max_concurrent=1), 1)
            assert shared.lost is not None and "did not answer" in shared.lost and shared.num_losses == 1
            store.thaw()
            shared._counts = patient
            await shared.start()
            for _ in range(600):
                if shared.lost is None:
                    break
                await asyncio.sleep(0.1)
            (await shared.charge(key(max_concurrent=1), 1)).settle(1)
            await shared.stop()

    run(main())


# Requests by name, in the order they happen: charged (with an estimate), or settled (with what they used).
STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=30)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, at_once=st.integers(1, 4), per_day=st.integers(1, 200))
def test_a_server_counts_as_memory_does(store: Store, steps: list[tuple[int, int]], at_once: int, per_day: int) -> None:
    """Where time plays no part, memory and a server grant and refuse the same, for the same reason."""

    async def main() -> None:
        limits = KeyLimits(max_concurrent=at_once, tokens_per_day=per_day)
        async with counts(store) as on_server:
            name = f"k{time.monotonic_ns()}"
            memory, mine = MemoryLimiter(KeyLimits()), key(name, max_concurrent=at_once, tokens_per_day=per_day)
            running: dict[int, tuple[Held, Lease]] = {}
            for index, (request, tokens) in enumerate(steps):
                if request in running:
                    held, lease = running.pop(request)
                    lease.settle(tokens)
                    await on_server.settle([Settlement(name, tokens, held)])
                    continue
                held = Held(f"{name}-{index}", name, tokens)
                over = await on_server.charge(held, limits, lease_s=NEVER_S)
                try:
                    running[request] = (held, await memory.charge(mine, tokens))
                    assert over is None
                except RateLimited as refused:
                    assert over is not None
                    assert refused.args == refusal(over.name, limits, over.wait_s).args or over.wait_s > 1
                    assert (over.wait_s == 1) == (refused.retry_after_s == 1)
            expected = (await memory.used_today([name])).get(name, 0)
            assert (await on_server.used_today([name])).get(name, 0) == expected

    run(main())
