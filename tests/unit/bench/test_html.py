"""The HTML report: complete, self-contained, and deaf to what texts in a report try."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.bench.made_reports import GPU, SLO, made_level, made_report
from tonle.bench.html.axes import axis_of
from tonle.bench.html.page import render_page
from tonle.bench.html.series import MAX_LANES, timeline
from tonle.bench.measure import ChangedAnswer, FailureGroup, LevelReport
from tonle.bench.report import Run, load_report
from tonle.bench.sweep import Saturation

HOSTILE = "</script><img src=x onerror=alert(1)><b>'\"&\u2028]]>"


class Page(HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.inside:
            self.inside[self._open][-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def full_level(users: int) -> LevelReport:
    return made_level(users, slo=SLO, gpus=[GPU], failed=3)


@pytest.fixture(scope="module")
def page() -> Page:
    report = made_report([full_level(1), full_level(4)], notes=["take care"])
    return Page(render_page([Run("before", report), Run("after", report)]))


def test_it_has_every_part(page: Page) -> None:
    headings = [
        "Summary", "Service level objectives", "Latency distributions", "Throughput against latency", "Timeline and requests",
        "Slowest requests", "Failures", "GPU", "Notes", "Conditions", "Definitions",
    ]  # fmt: skip
    for text in (
        *headings,
        "Warm-up: 2 requests",
        "take care",
        "HTTP 503: busy",
        "61.0 GiB of 80.0 GiB",
        "83%",
        "TTFT p95 ≤ 200 ms",
    ):
        assert text in page.text, text
    assert sum(tag == "svg" and "cdf" in str(has["class"]) for tag, has in page.tags) == 4
    assert sum(tag == "svg" and "tradeoff" in str(has["class"]) for tag, has in page.tags) == 12
    assert [has["id"] for tag, has in page.tags if tag == "canvas"] == ["tokens", "users", "heat", "lanes"]
    assert "Changed answers" not in page.text


def test_it_loads_nothing_and_runs_only_its_own_script(page: Page) -> None:
    [policy] = [str(has["content"]) for tag, has in page.tags if has.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for name, kind in (("script", "script-src"), ("style", "style-src")):
        code = page.inside[name][-1]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy, "otherwise the browser would not run it"
    for tag, has in page.tags:
        assert not {"src", "href", "style", "srcset"} & has.keys(), tag
        assert not any(name.startswith("on") for name in has), tag
    assert "http" not in re.sub(
        r"http://www\.w3\.org/2000/svg", "", page.inside["script"][-1] + page.inside["style"][0]
    )


def test_texts_of_a_report_do_nothing() -> None:
    level = msgspec.structs.replace(full_level(4), label=HOSTILE, failures=[FailureGroup(HOSTILE, 3)])
    rows = [
        msgspec.structs.replace(row, failure=HOSTILE, record=HOSTILE, changed=HOSTILE, finish_reason=HOSTILE)
        for row in level.rows or []
    ]
    level = msgspec.structs.replace(level, rows=rows, changed=[ChangedAnswer(HOSTILE, HOSTILE)])
    report = made_report(
        [level, full_level(8)], model=HOSTILE, url=HOSTILE, notes=[HOSTILE], settings={HOSTILE: HOSTILE, "x": [HOSTILE]},
        started_at=HOSTILE, prompt_kind=HOSTILE,
    )  # fmt: skip
    page = Page(render_page([Run(HOSTILE, report), Run("other", report)], HOSTILE))
    assert "img" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert msgspec.json.decode(page.inside["script"][0])["timelines"], "the data ends where it should"
    assert page.text.count("<img src=x onerror=alert(1)>") >= 8, "shown as text"


def test_settings_that_no_run_has_set_are_left_out() -> None:
    settings: list[dict[str, Any]] = [
        {"seed": 0, "sweep": None, "rates": []},
        {"seed": 0, "sweep": None, "rates": [2.0]},
    ]
    runs = [Run(str(i), made_report([full_level(1)], settings=each)) for i, each in enumerate(settings)]
    page = Page(render_page(runs))
    assert "setting seed" in page.text and "setting rates" in page.text
    assert "setting sweep" not in page.text


def test_thousands_of_requests_are_thinned_out_and_it_says_so() -> None:
    level = made_level(64, requests=3000, failed=5)
    found = timeline(level)
    assert found is not None
    assert len(found["lanes"]) == MAX_LANES and found["requests"] == 3000
    shown = {lane[0] for lane in found["lanes"]}
    slowest = max((row for row in level.rows or [] if row.e2el_ms), key=lambda row: row.e2el_ms or 0)
    assert slowest.index in shown and set(range(2995, 3000)) <= shown
    assert sum(found["heat"][2::3]) == sum(len(row.itl_ms) for row in level.rows or []), "every gap is in the heat"
    text = render_page([Run("many", made_report([level]))])
    assert f"more than {MAX_LANES} requests" in text
    assert len(text) < 200_000


def test_tokens_over_time_add_up() -> None:
    level = made_level(4)
    found = timeline(level)
    assert found is not None
    width_s = found["duration"] / len(found["steps"]["tokens"])
    assert sum(found["steps"]["tokens"]) * width_s == pytest.approx(level.output_tokens, rel=0.01)


def test_without_rows_it_says_what_is_missing() -> None:
    page = Page(render_page([Run("old", made_report([made_level(rows=False), made_level(8, rows=False)]))]))
    assert page.text.count("old was saved without its single requests") == 2
    assert not any(tag == "canvas" for tag, _ in page.tags)
    assert "Throughput against latency" in page.text


@pytest.mark.parametrize("rows", [True, False])
def test_changed_answers_are_named(*, rows: bool) -> None:
    changed = [ChangedAnswer(f"rec-{number}", "other text") for number in range(2)]
    level = msgspec.structs.replace(made_level(rows=rows), changed=changed, warmup=0)
    report = made_report([level])
    report.settings["replay"] = "audit"
    page = Page(render_page([Run("replay", report)]))
    assert "No warm-up" in page.text
    assert "2 of 40 replayed requests were answered differently." in page.text
    assert "rec-1" in page.text and "rec-2" not in page.text


@pytest.mark.parametrize("level", [made_level(requests=1), made_level(failed=40), made_level(tokens=(1, 1))])
def test_odd_levels_have_a_page_too(level: LevelReport) -> None:
    assert "Definitions" in render_page([Run("odd", made_report([level]))])
    assert "Definitions" in render_page([Run("empty", made_report([]))])


def test_a_simulated_run_is_called_so() -> None:
    page = Page(render_page([Run("plan", made_report([made_level()], kind="simulated"))]))
    assert "Simulated: no server was asked." in page.text


def test_old_reports_can_be_read(tmp_path: Path) -> None:
    """Of the first version: no kind, no SLO, no warm-up, no GPUs."""
    document = msgspec.to_builtins(made_report([made_level(rows=False)]))
    del document["kind"]
    for level in document["levels"]:
        for name in ("warmup", "slo", "goodput_per_s", "good_share", "graphemes_per_s", "gpus"):
            del level[name]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(document))
    report = load_report(tmp_path / "old.json")
    assert report.kind == "measured" and report.levels[0].slo == []
    assert "Summary" in render_page([Run("old", report)])


def test_where_a_sweep_ended_is_told() -> None:
    found = Saturation(
        by="rate", load=4.0, low=4.0, high=8.0, requests_per_s=3.9, output_tokens_per_s=250.0, limited_by="throughput",
        why="at 8 the queue grows",
    )  # fmt: skip
    page = Page(render_page([Run("sweep", made_report([made_level()], saturation=found))]))
    assert "Saturation: 4 requests per second (3.90 req/s, 250.0 output tok/s); at 8 the queue grows." in page.text


def test_axes_hold_their_values_and_have_a_few_numbers() -> None:
    for values in ([0.0, 3.0], [1.0, 1.0], [0.004, 9000.0], [12.0, 13.0], [5.0, 99999.0], [0.0]):
        axis = axis_of(values, 0, 100)
        assert all(0 <= axis.place(value) <= 100 for value in values)
        ticks = axis.ticks()
        assert 1 <= len(ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in ticks), values
        assert [axis.place(tick) for tick in ticks] == sorted(axis.place(tick) for tick in ticks)
