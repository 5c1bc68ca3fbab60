"""Each ended request is seen: its names, moments, tokens and cost, in the log, the figures and the usage of its server."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.gateway.running_gateway import ADMIN, RunningGateway, Upstream, rows, run, running_gateway, until
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, local_url
from tonle.engine.messages import LoopStats
from tonle.observe.observed import Observed
from tonle.observe.request_log import MOST_UNKNOWN
from tonle.observe.seen_request import SeenRequest
from tonle.replica.replica import ReplicaOptions
from tonle.replica.serve import build_server
from tonle.telemetry.time_spent import TimeSpent

METRICS = """vllm:num_requests_running{model_name="m"} 3
vllm:num_requests_waiting{model_name="m"} 1
vllm:generation_tokens_total{model_name="m"} %d
"""


def observed(place: RunningGateway) -> Observed:
    found = place.gateway.observed
    assert found is not None
    return found


def newest(place: RunningGateway) -> SeenRequest:
    return observed(place).request_log.newest(1)[0]


async def stream(place: RunningGateway, **fields: Any) -> None:
    """Returns when the whole answer was read, and the request left the pipeline."""
    before = len(observed(place).request_log)
    await place.ask(stream=True, **fields)
    await until(lambda: len(observed(place).request_log) > before, "the request was not seen")


def check_moments(seen: SeenRequest) -> None:
    """In the order in which things happen. The engine of this process tells of a token before its bytes are there."""
    first_byte_s = None if seen.is_local else seen.first_byte_s
    moments = [0.0, seen.accepted_s, seen.sent_s, first_byte_s, seen.ttft_s, seen.last_s, seen.total_s]
    known = [moment for moment in moments if moment is not None]
    assert known == sorted(known), moments


@pytest.mark.parametrize("keys", [{}, {"api_key": (), "admin_key": ()}])
def test_refusals_of_unknown_callers_push_nothing_out(tmp_path: Path, keys: dict[str, Any]) -> None:
    """A wrong key; where there are no keys, a page of another site."""

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), audit_dir=None, **keys) as place:
            log = observed(place).request_log
            assert (await place.ask(headers={"x-request-id": "mine"})).status_code == 200
            for _ in range(MOST_UNKNOWN + 3):
                await place.ask(key="wrong", headers={"origin": "http://evil.example"})
            await until(lambda: len(log) == 1 + MOST_UNKNOWN, "they are kept in places of their own")
            assert (await place.ask(model="missing")).status_code == 404, "refused, of a known caller"
            await until(lambda: len(log) == 2 + MOST_UNKNOWN, "it is kept among the others")
            assert log.find("mine") is not None
            today = time.strftime("%Y-%m-%d", time.gmtime())
            used = await observed(place).usage_rows(today, today)
            assert sum(row.requests for row in used) == 2 and all(row.key_id for row in used)
            status = 403 if keys else 401
            counted = f'tonle:gateway_requests_total{{http_status="{status}",status="refused"}} {MOST_UNKNOWN + 3}.0'
            assert counted in (await place.get("/metrics")).text

    run(main())


def test_a_streamed_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), price_per_hour=3600.0) as place:
            await stream(place, headers={"x-request-id": "mine-1"})
            seen = newest(place)
            assert observed(place).request_log.find("mine-1") == seen
            assert (seen.path, seen.model, seen.backend, seen.why) == ("/v1/chat/completions", "m", "b0", "only")
            assert (seen.status, seen.http_status, seen.error, seen.stream) == ("ok", 200, None, True)
            assert (seen.prompt_tokens, seen.completion_tokens) == (7, 3)
            assert seen.key_name == "from the settings" and seen.key_id.startswith("key-") and seen.owner
            assert abs(seen.arrived + seen.total_s - time.time()) < 60
            check_moments(seen)
            assert None not in (seen.accepted_s, seen.sent_s, seen.first_byte_s, seen.ttft_s, seen.last_s)
            assert seen.cost == pytest.approx(seen.device_s) and seen.device_s > 0, "at a unit a second"
            assert "Phnom" not in str(seen) and "capital" not in str(seen), "never a word of the text"

    run(main())


def test_a_whole_answer_of_a_replica_that_tells_its_times(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="tonle")
        upstream.extra_headers = [("x-queue-time", "0.25"), ("x-prefill-time", "0.5"), ("x-decode-time", "2")]
        async with running_gateway(tmp_path, upstream) as place:
            await place.ask()
            seen = newest(place)
            assert seen.ttft_s is not None and seen.last_s == pytest.approx(seen.ttft_s + 2) and seen.ttft_s >= 0.75
            assert seen.engine_s == {"queue": 0.25, "prefill": 0.5, "decode": 2.0} and seen.itl_s == pytest.approx(1.0)
            assert seen.cost is None, "there is no price"

    run(main())


def test_ends_of_all_kinds(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, retries=0) as place:
            await place.ask(key="nobody")
            seen = newest(place)
            assert (seen.status, seen.error, seen.key_id, seen.key_name) == ("refused", "invalid_api_key", "", "")
            assert seen.accepted_s is None and seen.backend == ""
            await place.ask(model="x" * 5000)
            seen = newest(place)
            assert (seen.status, seen.error, len(seen.model)) == ("refused", "model_not_found", 128)
            upstream.status = 500
            await place.ask()
            seen = newest(place)
            assert (seen.status, seen.http_status, seen.backend) == (
                "failed",
                500,
                "b0",
            ) and seen.error == "server_error"
            check_moments(seen)
            upstream.status, upstream.break_after = 200, 1
            await stream(place)
            seen = newest(place)
            assert seen.status == "failed" and seen.error == "UpstreamError" and seen.ttft_s is not None
            upstream.break_after, upstream.pause_after = None, 1
            task = asyncio.create_task(place.ask(stream=True))
            await until(lambda: len(upstream.requests) == 3, "it was not asked")
            task.cancel()
            await until(lambda: len(observed(place).request_log) == 5, "the hang-up was not seen")
            assert (newest(place).status, newest(place).error) == ("cancelled", "cancelled")
            sampler = observed(place).sampler
            await until(lambda: sum(sampler.errors().values()) == 5, "errors are not counted")
            upstream.resume.set()

    run(main())


def test_answers_from_the_cache(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for _ in range(2):
                await place.ask(temperature=0, use_cache=True)
            hit, miss = observed(place).request_log.newest()
            assert (miss.cache, miss.status, hit.cache, hit.status) == ("miss", "ok", "hit", "cached")
            assert hit.backend == "" and hit.completion_tokens == 3 and hit.device_s == 0
            (row,) = await observed(place).usage_rows("2000-01-01", "2999-12-31")
            assert (row.requests, row.completion_tokens, row.model) == (2, 3, "m")

    run(main())


def test_figures_and_usage_survive_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        for number in (1, 2):
            async with running_gateway(tmp_path, Upstream("m"), history_db=str(tmp_path / "history.db")) as place:
                assert observed(place).history.kind == "file"
                await place.ask()
                rows = await observed(place).usage_rows("2000-01-01", "2999-12-31")
                assert [row.requests for row in rows] == [number]
                if number == 2:
                    shown = await asyncio.to_thread(observed(place).history.series, 300)
                    assert sum(value or 0 for value in shown["series"]["requests_per_s"]) >= 1, "of the first run"

    run(main())


def test_backends_are_asked_for_their_load_with_their_own_key(tmp_path: Path) -> None:
    async def main() -> None:
        vllm, other = Upstream("m", owned_by="vllm"), Upstream("n")
        vllm.metrics = METRICS % 100
        other.metrics = METRICS % 100

        def backends() -> Any:
            first, second = rows(vllm, other, kind="auto")
            return msgspec.structs.replace(first, api_key="of-the-backend"), second

        async with running_gateway(tmp_path, vllm, other, backends=backends) as place:
            await until(lambda: observed(place).states(), "it was not asked")
            state = observed(place).states()["b0"]
            assert (state.running, state.waiting, state.generation_tokens) == (3, 1, 100)
            assert vllm.metrics_keys[0] == "Bearer of-the-backend" and not other.metrics_keys, "of kind auto: not known"
            vllm.metrics = METRICS % 600
            scraper, samples = place.gateway._scraper, []
            assert scraper is not None
            observed(place).sampler.listen(samples.append)
            await stream(place)
            await scraper.scrape()
            await until(lambda: sum(sample.output_tokens for sample in samples) >= 100, "tokens are not counted")
            vllm.metrics = None
            await scraper.scrape()
            assert not observed(place).states(), "errors leave nothing"
            vllm.metrics = "x" * 5 * 1024**2
            await scraper.scrape()
            assert not observed(place).states(), "too large"

    run(main())


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 10**308, "completion_tokens": 10**308}, (2**31 - 1, 2**31 - 1)),
        ({"type": "tokens", "input_tokens": 14, "output_tokens": 45, "total_tokens": 59}, (14, 45)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 10**308}}, (5, 2)),
        ({"prompt_tokens": "many", "completion_tokens": -1}, (0, 0)),
    ],
)
def test_metrics_and_usage_count_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: dict[str, Any], counted: tuple[int, int]
) -> None:
    """By all names that servers have for them, and whatever they say."""

    async def main() -> None:
        upstream, num_asked = Upstream("m"), 20  # 20 of the largest are more than a float can hold
        monkeypatch.setattr(upstream, "_usage", lambda: usage)
        async with running_gateway(tmp_path, upstream, cache=None) as place:
            for _ in range(num_asked):
                await place.ask()
            metrics = await place.get("/metrics")
            assert metrics.status_code == 200
            today = time.strftime("%Y-%m-%d", time.gmtime())
            (row,) = await observed(place).usage_rows(today, today)
            assert (row.prompt_tokens, row.completion_tokens) == tuple(num_asked * count for count in counted)
            for kind, count in zip(("prompt", "completion"), counted, strict=True):
                found = re.search(rf'tonle:gateway_tokens_total{{kind="{kind}"}} (\S+)', metrics.text)
                assert found is not None and float(found[1]) == num_asked * count

    run(main())


def test_prices_of_backends(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Upstream("m"), Upstream("n")

        def backends() -> Any:
            one, two = rows(first, second)
            return one, msgspec.structs.replace(two, price_per_hour=0.0)

        async with running_gateway(tmp_path, first, second, backends=backends, price_per_hour=3600.0) as place:
            for model in ("m", "n"):
                await place.ask(model=model)
            free, paid = observed(place).request_log.newest()
            assert paid.cost is not None and paid.cost > 0 and free.cost == 0.0

    run(main())


def test_the_page_shows_cost_where_only_a_backend_has_a_price(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Upstream("m"), Upstream("n")

        def backends() -> Any:
            one, two = rows(first, second)
            return one, msgspec.structs.replace(two, price_per_hour=2.49)

        async with running_gateway(tmp_path, first, second, backends=backends) as place:
            assert (await place.get("/dashboard/api/session")).json()["has"]["price"] is True
            gone = await place.client.delete("/admin/backends/b1", headers={"authorization": f"Bearer {ADMIN}"})
            assert gone.status_code == 202
            await until(lambda: len(place.gateway.pool.backends) == 1, "it stays")
            assert (await place.get("/dashboard/api/session")).json()["has"]["price"] is False

    run(main())


def test_without_a_dashboard_requests_are_still_logged(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")
        upstream.metrics = METRICS % 1
        async with running_gateway(tmp_path, upstream, dashboard=False, history_db=str(tmp_path / "h.db")) as place:
            await place.ask()
            assert newest(place).status == "ok"
            assert place.gateway._scraper is None and observed(place).sampler._timer is None
            assert not (tmp_path / "h.db").exists() and not upstream.metrics_keys

    run(main())


def test_the_engine_of_this_process(tmp_path: Path) -> None:
    async def main() -> None:
        front = FakeFront()
        gateway = build_server(front, ServeConfig(port=0, price_per_hour=3600.0))
        listener = bind("127.0.0.1", 0)
        await gateway.start(listener)
        found = gateway.observed
        assert found is not None
        samples: list[Any] = []
        found.sampler.listen(samples.append)
        try:
            await until(lambda: samples, "no second was closed")
            front.stats = LoopStats(num_running=2, generation_tokens=30, prompt_tokens=8, kv_usage=0.5)
            url = local_url(*listener.getsockname()[:2])
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                body = {"prompt": "abc", "max_tokens": 5}
                await client.post("/v1/completions", json=body | {"stream": True})
                await client.post("/v1/completions", json=body)
            await until(lambda: sum(sample.requests for sample in samples) == 2, "they were not counted")
            whole, streamed = found.request_log.newest()
            assert streamed.is_local and whole.is_local and streamed.backend == "local"
            assert streamed.cached_tokens == whole.cached_tokens == 4 and streamed.completion_tokens == 5
            assert (streamed.key_id, streamed.key_name) == ("anonymous", "no key")
            check_moments(streamed)
            assert streamed.cost is not None
            gaps = sum(sample.itl.count for sample in samples)
            assert gaps == 8, "four gaps of each answer, by the engine's own counts"
            assert sum(sample.output_tokens for sample in samples) == 40, "as the engine counts them, once"
            state = found.states()["local"]
            assert (state.running, state.kv_usage, state.generation_tokens) == (2, 0.5, 40)
        finally:
            await gateway.stop()

    run(main())


def test_of_several_front_ends_none_sees_all(tmp_path: Path) -> None:
    gateway = build_server(FakeFront(), ServeConfig(port=0), ReplicaOptions(metrics_dir=str(tmp_path)))
    assert gateway.observed is None and gateway._scraper is None


def test_time_spent_goes_along(tmp_path: Path) -> None:
    """Of several answers the slowest tells; the device computed all."""

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), price_per_hour=3600.0) as place:
            backend = place.gateway.pool.backends[0]
            send = backend.transport.send

            async def tell(method: str, path: str, body: bytes, headers: Any, sink: Any, **times: Any) -> None:
                await send(method, path, body, headers, sink, **times)
                sink.peek().spent = TimeSpent(device_s=0.5)

            backend.transport.send = tell  # type: ignore[method-assign]
            await place.ask(n=3)
            seen = observed(place).request_log.find(newest(place).id)
            assert (
                seen is not None
                and seen.spent == TimeSpent(device_s=0.5)
                and seen.device_s == 1.5
                and seen.cost == pytest.approx(1.5)
            )

    run(main())
