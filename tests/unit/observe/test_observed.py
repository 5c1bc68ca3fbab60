"""`Observed`: requests are counted many at a time; none is lost by that, and none counted twice."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tonle.observe import observed as module
from tonle.observe.backend_state import BackendState
from tonle.observe.history import History
from tonle.observe.observed import MOST_UNCOUNTED, Observed
from tonle.observe.sample import Sample
from tonle.observe.sampler import Sampler
from tonle.observe.seen_request import SeenRequest
from tonle.observe.sla import Sla
from tonle.observe.usage import UsageRow

NOON = 1_767_268_800.0  # 2026-01-01
DAY = "2026-01-01"


class Seconds:
    """What is observed, with a clock that stands still, and the samples that were closed."""

    def __init__(self, path: Path | None = None) -> None:
        self.now = NOON
        self.sampler = Sampler(clock=lambda: self.now)
        self.observed = Observed(sla=Sla(2.0), sampler=self.sampler, history=History(path, clock=lambda: self.now))
        self.samples: list[Sample] = []
        self.sampler.listen(self.samples.append)

    def end(self, count: int = 1, **fields: Any) -> None:
        for _ in range(count):
            self.observed.ended(seen(**fields))

    def close(self) -> Sample:
        self.now += 1
        self.sampler.close_until(int(self.now))
        return self.samples[-1]

    def rows(self) -> list[UsageRow]:
        return asyncio.run(self.observed.usage_rows(DAY, DAY))


def seen(**fields: Any) -> SeenRequest:
    known: dict[str, Any] = {
             "id": "r", "arrived": NOON, "path": "/v1/completions", "model": "m", "key_id": "k", "key_name": "alice",
             "status": "ok", "http_status": 200, "prompt_tokens": 10, "completion_tokens": 5, "backend": "b0",
             "accepted_s": 0.1, "sent_s": 0.1, "total_s": 1.0}  # fmt: skip
    return SeenRequest(**(known | fields))


@pytest.mark.parametrize("count", [1, MOST_UNCOUNTED - 1, MOST_UNCOUNTED, MOST_UNCOUNTED + 1, 3 * MOST_UNCOUNTED + 7])
def test_each_request_counts_once_and_in_its_second(count: int) -> None:
    seconds = Seconds()
    seconds.end(count)
    first = seconds.close()
    seconds.end(2)
    second = seconds.close()
    assert [first.requests, second.requests, seconds.close().requests] == [count, 2, 0]
    assert (first.e2e.count, first.output_tokens, second.e2e.count) == (count, 5 * count, 2)
    (row,) = seconds.rows()
    assert (row.requests, row.completion_tokens) == (count + 2, 5 * (count + 2))


def test_who_asks_in_the_middle_of_a_second_is_told_of_all_and_disturbs_nothing() -> None:
    seconds = Seconds()
    for asked in (1, 2, 3):
        seconds.end(3)
        assert [row.requests for row in seconds.rows()] == [3 * asked]
        assert len(seconds.observed.request_log) == 3 * asked
    assert seconds.close().requests == 9
    assert [row.requests for row in seconds.rows()] == [9]


def test_many_at_a_time_give_what_one_by_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    requests = [
        seen(
            id=str(number), status=draw.choice(("ok", "cached", "failed", "refused", "cancelled", "interrupted")),
            error=draw.choice((None, "e1", "e2")), cache=draw.choice(("hit", "miss", "bypass")),
            cost=draw.choice((None, 0.25, 0.5)), backend=draw.choice(("b0", "b1", "")), model=draw.choice(("m", "n")),
            key_id=draw.choice(("k", "l")), accepted_s=draw.choice((None, 0.1)), computed=draw.random() < 0.9,
            ttft_s=draw.choice((None, 0.5)), last_s=draw.choice((None, 1.0)), total_s=draw.choice((0.0, 1.0, 3.0, 2e6)),
            images=draw.choice((0, 0, 2)), arrived=NOON + draw.choice((0, 86_400)), device_s=draw.choice((0.0, 0.25)),
        )
        for number in range(300)
    ]  # fmt: skip
    found = []
    for most in (1, 7, MOST_UNCOUNTED, 1000):
        monkeypatch.setattr(module, "MOST_UNCOUNTED", most)
        seconds = Seconds()
        for request in requests:
            seconds.observed.ended(request)
        sample = seconds.close()
        rows = asyncio.run(seconds.observed.usage_rows(DAY, "2026-01-03"))
        found.append((msgspec.to_builtins(sample), rows, seconds.sampler.errors(), seconds.sampler.ended))
    assert all(other == found[0] for other in found[1:])
    assert found[0][0][2] == 300 and len(found[0][3]) == 100


def test_one_that_cannot_be_counted_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    seconds = Seconds()
    seconds.end(5, total_s=0.5)
    seconds.end(id="odd", prompt_tokens="many")  # no type is checked where it is made
    seconds.end(4, total_s=0.5)
    sample = seconds.close()
    assert (sample.requests, sample.e2e.count, sample.prompt_tokens) == (9, 9, 90)
    (row,) = seconds.rows()
    assert (row.requests, row.prompt_tokens) == (9, 90)
    assert [record.message for record in caplog.records] == ["a request could not be counted, id odd"] * 2


def test_tokens_count_by_what_was_known_of_the_backend_when_the_request_ended() -> None:
    seconds = Seconds()
    seconds.end(3)
    seconds.sampler.told(BackendState(name="b0", at=NOON, generation_tokens=100, prompt_tokens=100))
    seconds.end(4)  # these are in the next reading
    assert seconds.close().output_tokens == 15


def test_what_ended_is_saved_though_its_second_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.01)
    first = Seconds(tmp_path / "history.db")
    monkeypatch.setattr(first.sampler, "start", lambda: None)  # its seconds never end
    save, num_saved = first.observed._save, 0

    def counted() -> None:
        nonlocal num_saved
        save()
        num_saved += 1

    monkeypatch.setattr(first.observed, "_save", counted)

    async def main() -> None:
        await first.observed.start()
        first.end(3)
        wanted = num_saved + 2  # the first of them may have begun before that
        async with asyncio.timeout(120):
            while num_saved < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(saved_requests, tmp_path, tmp_path / "crash") == [3]
        monkeypatch.setattr(module, "SAVE_S", 60.0)
        await asyncio.sleep(0.1)
        first.end(2)
        await first.observed.stop()
        assert await asyncio.to_thread(saved_requests, tmp_path, tmp_path / "end") == [5]

    asyncio.run(main())


def saved_requests(folder: Path, copy: Path) -> list[int]:
    """What another process finds in the file as it is now."""
    copy.mkdir()
    for file in folder.glob("history.db*"):
        shutil.copy(file, copy)
    other = Seconds(copy / "history.db").observed
    rows = other.usage.rows(DAY, DAY)
    other.history.file.close()
    return [row.requests for row in rows]
