"""What a gateway records of requests it refuses, and that no flood of them fills the disk or takes others' records along."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from tests.gateway.running_gateway import CHAT, KEY, Upstream, run, running_gateway
from tonle.audit.verify import verify

JSON = "application/json"
BIG = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 500_000 + b'"}]}'


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_long_body_without_a_valid_key(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            headers = {"content-type": JSON} | ({"authorization": f"Bearer {key}"} if key else {})
            assert (await place.client.post(CHAT, content=BIG, headers=headers)).status_code == 401
        [record] = place.records()
        told = record["parameters"]["body"]
        assert told["declared_bytes"] == len(BIG)
        if told["received_bytes"] == len(BIG):
            assert told["sha256"] == hashlib.sha256(BIG).hexdigest()
        assert told["first"] == BIG[: min(2048, told["received_bytes"])].decode()
        assert (record["status"], record["error"]["code"]) == ("refused", "invalid_api_key")
        assert sum(path.stat().st_size for path in place.audit_dir.rglob("*_*.json")) < 10_000

    run(main())


def test_a_flood_without_a_key_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(
            tmp_path, Upstream("m"), audit_refused_per_address=2, audit_refused_per_second=2
        ) as place:

            async def refused() -> None:
                assert (await place.client.post(CHAT, content=BIG, headers={"content-type": JSON})).status_code == 401

            for _ in range(10):
                await asyncio.gather(*(refused() for _ in range(6)))
            assert (await place.ask("in between")).status_code == 200
        assert place.gateway.trail is not None
        stats = place.gateway.trail.stats
        assert stats.lost == 0
        recorded = [record["status"] for record in place.records()]
        assert recorded.count("ok") == 1
        assert recorded.count("refused") + stats.unrecorded == 60
        assert stats.unrecorded > 20
        report = verify(place.audit_dir)
        assert report.ok, report.findings
        assert any("refused requests of 127.0.0.1 (401, invalid_api_key)" in note for note in report.notes)

    run(main())


@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_a_deep_body_takes_no_record_of_others_with_it(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), audit_linger_s=0.2) as place:
            for depth in (600, *range(950, 992, 3), 5000):
                body = b'{"model":"m","x":' + b"[" * depth + b"]" * depth + b"}"
                headers = {"authorization": f"Bearer {key}", "x-request-id": f"deep-{depth}", "content-type": JSON}
                reply, ours = await asyncio.gather(
                    place.client.post(CHAT, content=body, headers=headers), place.ask("mine")
                )
                assert reply.status_code in (200, 400, 401)
                assert ours.status_code == 200
        asked = [record["request_id"] for record in place.records() if record["request_id"].startswith("deep-")]
        assert len(asked) == 16
        assert sum(record["user_input"] == "mine" for record in place.records()) == 16
        assert verify(place.audit_dir).ok
        assert "could not be recorded" not in json.dumps(place.records())

    run(main())
