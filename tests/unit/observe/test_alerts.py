"""Alerts: one state per subject, what is posted and what is held back, retries, signatures."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.fakes.webhook_receiver import Receiver, receiver
from tests.unit.edge.certificates import Authority
from tonle.errors import ConfigError
from tonle.observe import alerts as module
from tonle.observe.alerts import Alerts
from tonle.observe.webhook import Webhook, signing_key

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(24_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to hold")


async def settle() -> None:
    """Long enough for a post that would be sent now."""
    for _ in range(20):
        await asyncio.sleep(0.005)


class Clock:
    s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.005)
    return Clock()


@asynccontextmanager
async def running(place: Receiver, clock: Clock, **options: Any) -> AsyncIterator[Alerts]:
    webhook = Webhook(place.url, options.pop("secret", SECRET), now=lambda: 1_700_000_000.5)
    alerts = Alerts(webhook, clock=lambda: clock.s, now=lambda: 1_700_000_000.0 + clock.s, **options)
    alerts.source = "gpu-1:8000"
    await alerts.start()
    try:
        yield alerts
    finally:
        await alerts.stop()


def run(main: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 120))


def test_a_post_is_signed_and_says_what_is_wrong(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            alerts.fire("backend", "b", "backend b is dead: connection refused", {"reason": "connection refused"})
            await until(lambda: len(place.posts) == 1)
            ((target, headers, body),) = place.posts
            assert target == "/hooks/v1?token=t%20t"  # the whole address, untouched
            assert headers["content-type"] == "application/json"
            key = base64.b64decode(SECRET.removeprefix("whsec_"))
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
            assert headers["webhook-signature"] == f"v1,{expected}"
            assert headers["webhook-timestamp"] == "1700000000"
            document = json.loads(body)
            assert document["type"] == "alert.firing"
            assert document["text"] == "gpu-1:8000: backend b is dead: connection refused"
            assert document["data"] == {
                "kind": "backend", "subject": "b", "state": "firing", "source": "gpu-1:8000",
                "summary": "backend b is dead: connection refused", "since": "2023-11-14T22:30:00.000Z",
                "details": {"reason": "connection refused"}, "suppressed": 0,
            }  # fmt: skip

    run(main)


def test_the_documented_verifier(clock: Clock) -> None:
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def verify" in text]
    names: dict[str, Any] = {}
    exec(block, names)
    names["time"] = SimpleNamespace(time=lambda: 1_700_000_100.0)

    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            alerts.fire("backend", "b", "dead")
            await until(lambda: len(place.posts) == 1)
            ((_, headers, body),) = place.posts
            assert names["verify"](SECRET, headers, body) is True
            assert names["verify"](
                SECRET, headers | {"webhook-signature": f"v1,x {headers['webhook-signature']}"}, body
            )
            assert names["verify"](SECRET, headers, body + b" ") is False
            assert names["verify"]("another", headers, body) is False
            names["time"] = SimpleNamespace(time=lambda: 1_700_001_000.0)
            assert names["verify"](SECRET, headers, body) is False, "it is old"

    run(main)


def test_known_states_are_not_told_again(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            alerts.resolve("sla", "ttft", "never was wrong")
            for _ in range(5):
                alerts.fire("sla", "ttft", "TTFT p95 over 200 ms")
                await settle()
            assert place.told == ["ttft firing"]
            clock.s += module.SUBJECT_PAUSE_S
            alerts.resolve("sla", "ttft", "within its target again")
            alerts.resolve("sla", "ttft", "within its target again")
            await until(lambda: len(place.posts) == 2)
            assert place.told[1] == "ttft resolved"
            assert [(each.subject, each.state) for each in alerts.latest()] == [
                ("ttft", "resolved"),
                ("ttft", "firing"),
            ]
            assert (alerts.num_fired["sla"], alerts.num_firing("sla")) == (1, 0)

    run(main)


def test_a_subject_that_flaps_is_told_of_once_a_minute(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            alerts.fire("backend", "b", "dead")
            await until(lambda: place.told == ["b firing"])
            for _ in range(3):
                alerts.resolve("backend", "b", "back")
                alerts.fire("backend", "b", "dead")
            alerts.resolve("backend", "b", "back")  # the state that is true in the end
            await settle()
            assert len(place.posts) == 1
            clock.s += module.SUBJECT_PAUSE_S
            alerts.fire("backend", "c", "dead")  # wakes the task, whose clock is ours
            await until(lambda: len(place.posts) == 3)
            assert set(place.told[1:]) == {"b resolved", "c firing"}
            (b,) = [each for each in place.data[1:] if each["subject"] == "b"]
            assert b["suppressed"] == 6
            assert alerts.posts == {"delivered": 3, "failed": 0, "suppressed": 6}

    run(main)


def test_no_more_than_so_many_in_an_hour(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PER_HOUR", 3)

    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            for name in "abcde":
                alerts.fire("backend", name, "dead")
            await until(lambda: len(place.posts) == 3)
            alerts.resolve("backend", "d", "back")  # was never told: not worth a post, but counted
            await settle()
            assert len(place.posts) == 3
            clock.s += 3601
            alerts.fire("sla", "ttft", "slow")
            await until(lambda: len(place.posts) == 5)
            assert set(place.told[3:]) == {"e firing", "ttft firing"}
            assert sorted(each["suppressed"] for each in place.data[3:]) == [0, 2]

    run(main)


def test_a_receiver_that_fails_is_tried_again_and_complained_of_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tonle.alerts")

    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            place.status = 503
            alerts.fire("audit", "writing", "disk full")
            await until(lambda: len(place.posts) >= 4)
            place.status = 200
            await until(lambda: alerts.posts["delivered"] == 1)
            assert len({headers["webhook-id"] for _, headers, _ in place.posts}) == 1, "the same message"
            assert len({body for _, _, body in place.posts}) == 1

    run(main)
    lines = [record.getMessage() for record in caplog.records]
    (complaint,) = [line for line in lines if "cannot be delivered" in line]
    assert "503" in complaint and "token" not in complaint, "the address may hold a secret"
    assert sum("delivered" in line and "again" in line for line in lines) == 1


def test_it_gives_up_after_a_while_and_tells_of_it_next_time(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            place.status = 500
            alerts.fire("audit", "writing", "disk full")
            await until(lambda: len(place.posts) >= 2)
            clock.s += module.GIVE_UP_S
            await until(lambda: alerts.posts["failed"] == 1)
            tried = len(place.posts)
            await settle()
            assert len(place.posts) == tried
            place.status = 200
            alerts.fire("backend", "b", "dead")
            await until(lambda: alerts.posts["delivered"] == 1)
            assert place.data[-1]["subject"] == "b" and place.data[-1]["suppressed"] == 1

    run(main)


@pytest.mark.parametrize("status", [302, 400, 404, 410])
def test_what_will_not_work_later_is_not_tried_again(clock: Clock, status: int) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            place.status = status
            alerts.fire("audit", "writing", "disk full")
            await until(lambda: alerts.posts["failed"] == 1)
            await settle()
            assert len(place.posts) == 1

    run(main)


def test_a_state_that_changed_during_an_outage_is_posted_as_it_is_then(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            place.status = 503
            alerts.fire("backend", "b", "dead")
            await until(lambda: len(place.posts) >= 2)
            alerts.resolve("backend", "b", "back")
            await settle()
            place.status = 200
            num_tried = len(place.posts)
            await settle()
            assert alerts.posts["delivered"] == 0 and len(place.posts) == num_tried, (
                "nothing is wrong, nothing was told"
            )
            alerts.fire("backend", "b", "dead again")
            await until(lambda: alerts.posts["delivered"] == 1)
            assert place.data[-1]["summary"] == "dead again" and place.data[-1]["suppressed"] == 2

    run(main)


def test_a_receiver_that_is_not_there(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The caller of `fire` never waits, and what waits is bounded by the number of subjects."""

    async def main() -> None:
        place = Receiver()
        place.url = "http://127.0.0.1:9/"
        async with running(place, clock, secret=None) as alerts:
            for index in range(5000):
                alerts.fire("backend", f"b{index}", "dead")
            assert alerts.num_firing("backend") == module.MAX_SUBJECTS
            await settle()
            assert len(alerts.latest()) == module.KEPT

    run(main)
    assert sum("cannot be delivered" in record.getMessage() for record in caplog.records) == 1


def test_what_fires_is_known_however_much_changed_since() -> None:
    alerts = Alerts(now=iter(range(100)).__next__)
    alerts.fire("audit", "writing", "disk full")
    for _ in range(module.KEPT):
        alerts.fire("backend", "b", "dead")
        alerts.resolve("backend", "b", "back")
    alerts.fire("backend", "c", "dead")
    assert "writing" not in {each.subject for each in alerts.latest()}
    assert [(each.subject, each.state, each.summary) for each in alerts.firing()] == [
        ("c", "firing", "dead"),
        ("writing", "firing", "disk full"),
    ]


def test_subjects_that_are_right_again_make_room_for_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    alerts = Alerts()
    alerts.fire("backend", "stays", "dead")
    for index in range(3 * module.MAX_SUBJECTS):
        alerts.fire("backend", f"b{index}", "dead")
        assert alerts.is_firing("backend", f"b{index}")
        alerts.resolve("backend", f"b{index}", "was removed")
    assert alerts.is_firing("backend", "stays")
    assert len(alerts._subjects) == module.MAX_SUBJECTS
    assert not [record for record in caplog.records if "not followed" in record.getMessage()]


def test_while_all_subjects_fire_targets_and_the_audit_are_still_followed(caplog: pytest.LogCaptureFixture) -> None:
    alerts = Alerts()
    for index in range(module.MAX_SUBJECTS + 10):
        alerts.fire("backend", f"b{index}", "dead")
    assert not alerts.is_firing("backend", f"b{module.MAX_SUBJECTS}")
    alerts.fire("sla", "ttft", "TTFT p95 over 200 ms")
    alerts.fire("audit", "writing", "disk full")
    assert alerts.is_firing("sla", "ttft") and alerts.is_firing("audit", "writing")
    complaints = [record.getMessage() for record in caplog.records if "not followed" in record.getMessage()]
    assert len(complaints) == 1 and f"{module.MAX_SUBJECTS:,}" in complaints[0]
    for index in range(3):
        alerts.resolve("backend", f"b{index}", "back")
    alerts.fire("backend", "new", "dead")
    assert alerts.is_firing("backend", "new")


def test_of_subjects_that_are_right_again_the_untold_ones_are_forgotten_last(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SUBJECTS", 3)

    async def main() -> None:
        async with receiver() as place, running(place, clock) as alerts:
            for name in "abc":
                alerts.fire("backend", name, "dead")
            await until(lambda: alerts.posts["delivered"] == 3)
            alerts.resolve("backend", "a", "back")  # first, but within its pause: it is not told yet
            clock.s += module.SUBJECT_PAUSE_S / 2
            alerts.resolve("backend", "b", "back")
            clock.s += module.SUBJECT_PAUSE_S / 2
            alerts.resolve("backend", "c", "back")
            await until(lambda: alerts.posts["delivered"] == 6)
            clock.s += module.SUBJECT_PAUSE_S
            alerts.fire("backend", "a", "dead again")
            await until(lambda: alerts.posts["delivered"] == 7)
            alerts.resolve("backend", "a", "back")
            alerts.fire("backend", "d", "dead")  # b or c goes: what is known of these was told
            await until(lambda: "d firing" in place.told)
            clock.s += module.SUBJECT_PAUSE_S
            alerts.fire("backend", "e", "dead")
            await until(lambda: place.told[-3:].count("a resolved") == 1)

    run(main)


def test_https(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate must be good; SSL_CERT_FILE names an authority of the operator's own."""
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.cert, pair.key)

    async def main() -> None:
        async with receiver(tls) as place:
            async with running(place, clock) as alerts:
                alerts.fire("audit", "writing", "disk full")
                await until(lambda: alerts._backoff_s > 0)
                assert not place.posts
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
            async with running(place, clock) as alerts:
                alerts.fire("audit", "writing", "disk full")
                await until(lambda: alerts.posts["delivered"] == 1)
                assert place.told == ["writing firing"]

    run(main)


def test_without_a_secret_posts_are_not_signed(clock: Clock) -> None:
    async def main() -> None:
        async with receiver() as place, running(place, clock, secret=None) as alerts:
            alerts.fire("audit", "writing", "disk full")
            await until(lambda: len(place.posts) == 1)
            assert "webhook-id" in place.posts[0][1] and "webhook-signature" not in place.posts[0][1]

    run(main)


def test_without_a_webhook_it_only_remembers() -> None:
    async def main() -> None:
        alerts = Alerts()
        await alerts.start()
        alerts.fire("backend", "b", "dead")
        assert alerts.is_firing("backend", "b") and alerts.latest()[0].summary == "dead"
        await alerts.stop()

    run(main)


def test_secrets_and_addresses_that_cannot_work_are_refused() -> None:
    assert signing_key("any text") == b"any text"
    assert signing_key("whsec_aGVsbG8gdGhlcmU=") == b"hello there"
    with pytest.raises(ConfigError, match="not base64"):
        signing_key("whsec_***")
    for short in ("whsec_", "whsec_aGVsbG8=", "", "1234567"):
        with pytest.raises(ConfigError, match=r"alert_secret .* at least 8 bytes"):
            signing_key(short)
    for url in ("ftp://host/", "host:80/x", "http://user:word@host/", "http://"):
        with pytest.raises(ConfigError, match="alert_webhook"):
            Webhook(url)
