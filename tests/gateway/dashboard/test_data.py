"""Requests, history and usage, as the page asks for them."""

from __future__ import annotations

import csv
import datetime
import io
from pathlib import Path

import pytest

from tests.gateway.dashboard.pages import API
from tests.gateway.running_gateway import KEY, Upstream, run, running_gateway, until
from tonle.observe.sample import NAMES


def test_requests_are_listed_filtered_and_opened(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for number in range(3):
                await place.ask(f"question {number}", headers={"x-request-id": f"req-{number}"})
            await place.ask(model="missing", headers={"x-request-id": "req-bad"})
            found = (await place.get(f"{API}/requests?limit=10")).json()
            assert [row["id"] for row in found["requests"]] == ["req-bad", "req-2", "req-1", "req-0"]
            assert (found["kept"], found["most"]) == (4, 5000)
            row = found["requests"][1]
            assert (row["status"], row["http_status"], row["backend"], row["completion_tokens"]) == ("ok", 200, "b0", 3)
            assert row["key"] == "from the settings" and row["total_s"] > 0 and "question" not in str(row)
            older = (await place.get(f"{API}/requests?before={found['requests'][2]['number']}")).json()["requests"]
            assert [row["id"] for row in older] == ["req-0"]
            for query, ids in (("status=refused", ["req-bad"]), ("text=REQ-2", ["req-2"]), ("model=missing", ["req-bad"]),
                               ("backend=b0&limit=1", ["req-2"]), ("key=nobody", [])):  # fmt: skip
                rows = (await place.get(f"{API}/requests?{query}")).json()["requests"]
                assert [row["id"] for row in rows] == ids, query
            opened = (await place.get(f"{API}/requests/req-1")).json()
            assert opened["request"]["id"] == "req-1"
            assert sum(span["seconds"] for span in opened["explanation"]["spans"]) == pytest.approx(
                opened["explanation"]["total_s"]
            )
            assert opened["explanation"]["sentences"]
            assert (await place.get(f"{API}/requests/req-9")).status_code == 404

    run(main())


def test_requests_that_all_have_one_id_are_listed_and_opened_one_by_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for number in range(4):
                await place.ask(f"question {number}", headers={"x-request-id": "same"})
            told, before = [], ""
            while rows := (await place.get(f"{API}/requests?limit=3{before}")).json()["requests"]:
                told += rows
                before = f"&before={rows[-1]['number']}"
            assert len(told) == len({row["number"] for row in told}) == 4
            trail = place.gateway.trail
            assert trail is not None
            await until(lambda: trail.stats.written >= 4, "records are not written")
            for row in told:
                opened = (await place.get(f"{API}/requests/same?number={row['number']}")).json()
                assert opened["request"] == row
                record = opened["audit"]["record"]
                assert record["messages"][0]["content"] == f"question {3 - told.index(row)}", "its own record"
            assert (await place.get(f"{API}/requests/same")).json()["request"] == told[0]
            assert (await place.get(f"{API}/requests/same?number=1")).status_code == 404

    run(main())


@pytest.mark.parametrize(
    "path",
    ["requests?limit=0", "requests?limit=1001", "requests?limit=-1", "requests?limit=1e9", "requests?limit=%F0%9F%98%80",
     "requests?limit=٣", "requests?before=req-1", "requests/x?number=y",
     f"requests?text={'x' * 1001}", "requests?" + "a=1&" * 60, "history?range=1", "history?range=x",
     "usage?from=yesterday", "usage?from=2026-02-30", "usage?from=2026-01-02&to=2026-01-01",
     "usage?from=2020-01-01&to=2026-01-01", "usage.csv?to=0001-01-01", "audit?limit=501", "audit?from=yesterday"],
)  # fmt: skip
def test_queries_that_make_no_sense_are_refused(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            reply = await place.get(f"{API}/{path}")
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["message"]

    run(main())


def test_history_has_all_names_in_steps(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), history_db=str(tmp_path / "history.db")) as place:
            await place.ask()
            observed = place.gateway.observed
            assert observed is not None
            await until(lambda: observed.sampler.latest is not None and observed.sampler.latest.requests, "not counted")
            for range_s in (300, 3600, 86_400, 2_592_000):
                found = (await place.get(f"{API}/history?range={range_s}")).json()
                assert set(found["series"]) == set(NAMES)
                assert {len(values) for values in found["series"].values()} == {len(found["t"])}
            assert max(value or 0 for value in found["series"]["requests_per_s"]) > 0
            seen = (await place.get(f"{API}/session")).json()
            assert seen["has"]["history"] == "file"

    run(main())


def test_usage_and_its_csv(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), price_per_hour=3.6) as place:
            evil = (await place.post("/admin/keys", {"name": '=HYPERLINK("http://evil.example","x"),\n"y"'})).json()[
                "key"
            ]
            plus = (await place.post("/admin/keys", {"name": "+1"})).json()["key"]
            for key in (KEY, evil, evil, plus):
                assert (await place.ask(key=key)).status_code == 200
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            found = (await place.get(f"{API}/usage?from={today}&to={today}")).json()
            assert len(found["rows"]) == 3 and all(row["cost"] > 0 for row in found["rows"])
            assert sum(row["requests"] for row in found["rows"]) == 4
            assert {(row["day"], row["model"]) for row in found["rows"]} == {(today, "m")}
            reply = await place.get(f"{API}/usage.csv?from={today}&to={today}")
            assert reply.headers["content-type"] == "text/csv; charset=utf-8"
            assert reply.headers["content-disposition"] == f'attachment; filename="tonle-usage-{today}-{today}.csv"'
            rows = list(csv.DictReader(io.StringIO(reply.text, newline="")))
            names = {row["key_name"] for row in rows}
            assert names == {"from the settings", "'+1", '\'=HYPERLINK("http://evil.example","x"),\n"y"'}
            assert sum(int(row["requests"]) for row in rows) == 4
            assert sum(int(row["completion_tokens"]) for row in rows) == 12
            empty = (await place.get(f"{API}/usage?from=2020-01-01&to=2020-01-31")).json()
            assert empty["rows"] == []

    run(main())
