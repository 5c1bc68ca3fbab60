"""The audit trail on the page: search, verification of one record and of all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.dashboard.pages import API, make_key
from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, run, running_gateway, until
from tonle.gateway.dashboard import audit_pages


async def recorded(place: RunningGateway, count: int) -> None:
    trail = place.gateway.trail
    assert trail is not None
    await until(lambda: trail.stats.written >= count, "records are not written")


def files(place: RunningGateway) -> list[Path]:
    return sorted(path for path in place.audit_dir.glob("*/*.json") if path.name != "head.json")


def test_records_are_found_and_verified(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            empty = (await place.get(f"{API}/audit")).json()
            assert empty["records"] == [] and empty["state"]["records"] == 0
            for number, text in enumerate(("about rivers", "about mountains")):
                await place.ask(text, headers={"x-request-id": f"req-{number}"})
            await recorded(place, 2)
            found = (await place.get(f"{API}/audit?text=RIVERS")).json()
            assert [row["request_id"] for row in found["records"]] == ["req-0"]
            state = found["state"]
            assert (state["directory"], state["records"], state["alarm"]) == (str(place.audit_dir), 2, None)
            assert len(state["key_fingerprint"]) == 64 and state["last_seal"].startswith("20")
            newest = (await place.get(f"{API}/audit?status=ok&limit=1")).json()["records"]
            assert [row["request_id"] for row in newest] == ["req-1"]
            assert (await place.get(f"{API}/audit?from=2030-01-01")).json()["records"] == []
            opened = (await place.get(f"{API}/audit/req-0")).json()
            assert (opened["verified"], opened["redacted"]) == ("verified", []), opened["detail"]
            assert opened["record"]["request_id"] == "req-0" and "rivers" in json.dumps(opened["record"]["messages"])
            beside = (await place.get(f"{API}/requests/req-0")).json()["audit"]
            assert (beside["verified"], beside["record"]["request_id"]) == ("verified", "req-0")
            assert (await place.get(f"{API}/audit/req-9")).status_code == 404
            all_of_it = (await place.post(f"{API}/audit/verify")).json()
            assert (all_of_it["ok"], all_of_it["checked"], all_of_it["findings"]) == (True, 2, [])
            assert "2 records of 1 day: in order" in all_of_it["summary"]

    run(main())


def test_what_was_changed_shows(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for number in range(3):
                await place.ask(f"text {number}", headers={"x-request-id": f"req-{number}"})
            await recorded(place, 3)
            assert (await place.get(f"{API}/audit")).json()["state"]["records"] == 3
            edited, gone = (next(path for path in files(place) if f"text {n}" in path.read_text()) for n in (0, 1))
            edited.write_text(edited.read_text().replace("text 0", "text X"))
            shown = (await place.get(f"{API}/audit/req-0")).json()
            assert shown["verified"] == "tampered" and "not what was written" in shown["detail"]
            gone.unlink()
            missing = await place.get(f"{API}/audit/req-1")
            assert missing.status_code == 404 and "tampered: its file is gone" in missing.json()["error"]["message"]
            beside = (await place.get(f"{API}/requests/req-1")).json()["audit"]
            assert beside == {"record": None, "verified": "tampered", "detail": "its file is gone"}
            assert (await place.get(f"{API}/audit/req-2")).json()["verified"] == "verified"
            found = (await place.post(f"{API}/audit/verify")).json()
            assert (
                found["ok"] is False and len(found["findings"]) == 2 and "2 findings in 3 records" in found["summary"]
            )
            (ledger,) = place.audit_dir.glob("*/chain.jsonl")
            ledger.write_bytes(ledger.read_bytes().replace(b'"seq":3', b'"seq":4'))
            assert (await place.get(f"{API}/audit/req-2")).json()["verified"] == "tampered"

    run(main())


def test_a_redacted_record_says_so_and_holds(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask("my number is 012 345 678", headers={"x-request-id": "req-0"})
            await recorded(place, 1)
            await asyncio.to_thread(redact, place.audit_dir, "req-0")
            shown = (await place.get(f"{API}/audit/req-0")).json()
            assert shown["verified"] == "verified", shown["detail"]
            assert shown["redacted"] == ["messages", "user_input"] and "012 345 678" not in json.dumps(shown["record"])

    run(main())


def redact(directory: Path, name: str) -> None:
    fields = ("--field", "messages", "--field", "user_input")
    command = [sys.executable, "-m", "tonle", "audit", "redact", str(directory), name, *fields]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_of_two_requests_with_one_id_each_key_sees_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            other = (await make_key(place, "models"))["key"]
            await place.ask("the first text", key=other, headers={"x-request-id": "twice"})
            await place.ask("the second text", key=KEY, headers={"x-request-id": "twice"})
            await recorded(place, 2)
            opened = (await place.get(f"{API}/requests/twice")).json()
            assert opened["audit"]["record"]["key_id"] == opened["request"]["key_id"]
            assert "second" in json.dumps(opened["audit"]["record"]["messages"])

    run(main())


def test_a_request_with_a_wrong_key_is_shown_with_its_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask(key="wrong", headers={"x-request-id": "refused"})
            await recorded(place, 1)
            opened = (await place.get(f"{API}/requests/refused")).json()
            assert opened["request"]["http_status"] == 401 and opened["request"]["key_id"] == ""
            assert opened["audit"]["record"]["http_status"] == 401 and opened["audit"]["verified"] == "verified"

    run(main())


def test_one_verification_at_a_time_and_few_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_run = 0
    original = audit_pages._verify

    def counted(options: object) -> object:
        nonlocal num_run
        num_run += 1
        return original(options)  # type: ignore[arg-type]

    monkeypatch.setattr(audit_pages, "_verify", counted)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask()
            await recorded(place, 1)
            replies = await asyncio.gather(*(place.post(f"{API}/audit/verify") for _ in range(8)))
            assert {reply.status_code for reply in replies} == {200} and num_run < 8
            searches = await asyncio.gather(*(place.get(f"{API}/audit") for _ in range(40)))
            assert {reply.status_code for reply in searches} == {200, 503}

    run(main())


def test_who_may_read_the_trail(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask()
            await recorded(place, 1)
            reader = (await make_key(place, "dashboard"))["key"]
            for method, path in (("GET", "audit"), ("GET", "audit/x"), ("POST", "audit/verify"), ("GET", "requests")):
                for key, status in ((KEY, 403), ("wrong", 401)):
                    headers = {"authorization": f"Bearer {key}"}
                    assert (await place.client.request(method, f"{API}/{path}", headers=headers)).status_code == status
            assert (await place.get(f"{API}/audit", key=reader)).status_code == 200
        async with running_gateway(tmp_path / "other", Upstream("m"), audit_dir=None) as place:
            refused = await place.get(f"{API}/audit")
            assert refused.status_code == 404 and "--audit-dir" in refused.json()["error"]["message"]
            await place.ask(headers={"x-request-id": "req-0"})
            assert (await place.get(f"{API}/requests/req-0")).json()["audit"]["verified"] == "none"

    run(main())


def test_callers_that_hang_up_leave_one_search_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, original = threading.Event(), audit_pages._find

    def held(*args: Any) -> Any:
        going_on.wait(60)
        return original(*args)

    def num_running() -> int:
        return sum(thread.name == "tonle-audit-search" for thread in threading.enumerate())

    monkeypatch.setattr(audit_pages, "_find", held)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            pages = place.gateway.routes.dashboard._audit
            try:
                for number in range(1, audit_pages.MAX_WAITING + 1):
                    asking = asyncio.create_task(place.get(f"{API}/audit"))
                    await until(lambda number=number: pages._num_waiting == number, "the search was not begun")
                    asking.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asking
                await until(lambda: place.gateway.server.num_active == 0, "its caller is not known to be gone")
                assert num_running() == 1
                assert (await place.get(f"{API}/audit")).status_code == 503
            finally:
                going_on.set()
            await until(lambda: num_running() == 0, "searches go on")
            assert (await place.get(f"{API}/audit")).status_code == 200

    run(main())


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("text=%00%00%00", 200),
        ("text=%22%20OR%201%3D1%20--", 200),
        ("text=a*%20NEAR%20(", 200),
        ("from=0001-01-01T00:00:00%2B14:00", 400),
        ("to=9999-12-31T23:59:59-14:00", 400),
    ],
)
def test_odd_searches(tmp_path: Path, query: str, status: int) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask("about rivers")
            await recorded(place, 1)
            reply = await place.get(f"{API}/audit?{query}")
            assert reply.status_code == status and not reply.json().get("records")

    run(main())
