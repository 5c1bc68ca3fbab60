"""What is said about metrics and what is measured: docs/metrics.md, the Grafana board and the alert rules against a real
server and a real gateway, both ways; `tonle top` on both; the alert of an engine that dies."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import promql
from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_gateway, tonle_serve
from tests.unit.deploy.schemas import FOLDER, validator
from tests.unit.telemetry.test_gpu import OURS, Driver
from tests.unit.telemetry.test_metrics import Card, Engine, Stats
from tonle.gateway.limits.shared_limiter import SharedMetrics
from tonle.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
KEY = "key-of-the-test"
SCRAPER_LABELS = {"instance", "job"}  # Prometheus adds them


@dataclass
class Place:
    server: Server
    gateway: Server
    posts: list[dict[str, Any]]  # to the server's alert webhook

    def scrape(self, server: Server) -> str:
        return httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("metrics")
    save_folder("llama", folder / "tiny")
    posts: list[dict[str, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    webhook = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=webhook.serve_forever, daemon=True).start()
    common = [
        "--cache",
        "memory",
        "--api-key",
        KEY,
        "--sla-ttft-p95",
        "10s",
        "--sla-itl-p95",
        "10s",
        "--history-db",
        "memory",
    ]
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events"}
    flags = ["--device", "cpu", "--role", "both", "--kv-offload-memory", "4MiB", "--kv-events-config", json.dumps(events),
             "--enable-lora", "--target-itl", "1s", "--target-ttft", "10s", "--audit-dir", str(folder / "a"),
             "--alert-webhook", f"http://127.0.0.1:{webhook.server_port}/"]  # fmt: skip
    with tonle_serve(folder / "tiny", *flags, *common) as server:
        os.environ["KEY_OF_THE_SERVER"] = KEY
        (folder / "gateway.yaml").write_text(
            yaml.safe_dump({"backends": [{"url": server.url, "name": "b", "api_key_env": "KEY_OF_THE_SERVER"}]})
        )
        gateway_flags = ["--config", str(folder / "gateway.yaml"), "--audit-dir", str(folder / "b"),
                         "--state-db", str(folder / "state.db")]  # fmt: skip
        with tonle_gateway(*gateway_flags, *common) as gateway:
            for stream in (True, False):
                body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream}
                answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60,
                                    headers={"authorization": f"Bearer {KEY}"})  # fmt: skip
                assert answer.status_code == 200, answer.text
            yield Place(server, gateway, posts)
    webhook.shutdown()


@pytest.fixture(scope="module")
def scrapes(place: Place) -> dict[str, str]:
    for server in (place.server, place.gateway):  # targets are judged once a second
        wait_for(lambda server=server: "tonle:sla_p95_seconds{" in place.scrape(server))  # type: ignore[misc]
    return {"server": place.scrape(place.server), "gateway": place.scrape(place.gateway)}


def types(scrape: str) -> dict[str, str]:
    """Name -> type."""
    found = re.findall(r"(?m)^# TYPE (\S+) (\w+)$", scrape)
    return {name: kind for name, kind in found if not name.endswith("_created")}


def labels(scrape: str) -> dict[str, set[str]]:
    """Name of a sample -> its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """What needs a GPU, or a store that several gateways share."""
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    gpu = Metrics("m", Engine(Stats(), Card(gpu=OURS))).render("")[0].decode()
    registry = CollectorRegistry()
    limiter: Any = SimpleNamespace(lost=None, num_losses=0, num_running=0)
    registry.register(SharedMetrics(limiter))
    text = gpu + generate_latest(registry).decode()
    wanted = re.compile(r"(?:# \w+ )?tonle:(gpu|state)_")
    return "".join(line for line in text.splitlines(keepends=True) if wanted.match(line))


@dataclass
class Row:
    name: str
    type: str
    labels: set[str]
    where: str


def documented() -> list[Row]:
    rows = [
        re.split(r"\s*\|\s*", line)[1:-1]
        for line in PAGE.splitlines()
        if re.match(r"\| `[a-z0-9:_]+` \| (gauge|co|hi)", line)
    ]
    return [
        Row(name.strip("`"), kind, set(re.findall(r"`([a-z_]+)`", shown)) - {"n"}, where)
        for name, kind, shown, where, _ in rows
    ]


def test_the_page_lists_what_is_measured_and_nothing_else(
    scrapes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = documented()
    shown = {row.name: row.type for row in rows}
    assert len(shown) == len(rows), "a metric is listed twice"
    special = types(elsewhere(monkeypatch))
    assert shown == types(scrapes["server"]) | types(scrapes["gateway"]) | special
    for row in rows:
        if "with an NVIDIA GPU" in row.where or "shared" in row.where:
            assert row.name in special
        else:
            assert (row.name in types(scrapes["server"])) == row.where.startswith(("server", "both")), row.name
            assert (row.name in types(scrapes["gateway"])) == row.where.startswith(("gateway", "both")), row.name


def test_the_page_names_the_labels(scrapes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = labels(scrapes["server"]) | labels(scrapes["gateway"]) | labels(elsewhere(monkeypatch))
    for row in documented():
        sample = row.name + ("_bucket" if row.type == "histogram" else "")
        if sample not in known:
            continue  # nothing of it has happened yet
        expected = known[sample] - {"le"}
        if row.name.startswith("vllm:"):
            expected -= {"model_name"}
            row.labels -= {"model_name"}
        assert row.labels == expected, row.name


def test_vllms_names_that_are_missing_are_missing(scrapes: dict[str, str]) -> None:
    section = PAGE.split("### vLLM's names that are missing")[1].split("\n## ")[0]
    names = re.findall(r"`(vllm:[a-z0-9_]+)(…?)", section)
    assert len(names) > 10
    for name, _ in names:
        assert not any(each.startswith(name) for each in types(scrapes["server"])), name


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "tonle.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy" / "grafana" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]
    variables = [each["query"]["query"] for each in board()["templating"]["list"] if each["type"] == "query"]
    return [*panels, *variables, *(rule["expr"] for rule in rules())]


def test_every_metric_of_the_board_and_the_alerts_exists(
    scrapes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, set[str]] = {}
    for scrape in (*scrapes.values(), elsewhere(monkeypatch)):
        for name, found in labels(scrape).items():
            known.setdefault(name, set()).update(found)
    assert len(expressions()) > 60
    for expression in expressions():
        for name, used in promql.read(expression):
            if name in ("instance", "model_name"):  # a label, in label_values
                continue
            assert name in known, f"{name}, in {expression}"
            assert used <= known[name] | SCRAPER_LABELS, f"{name} has no label {used - known[name]}, in {expression}"


@pytest.mark.parametrize("wrong", [
    "sum(rate(a_total))", "sum by le (a)", "a{b=c}", "rate(a_total[5m]", "a >", "a[5m]", "nonsense(a)", "a b", "",
])  # fmt: skip
def test_what_is_no_expression_is_found(wrong: str) -> None:
    with pytest.raises(ValueError, match="'"):
        promql.read(wrong)


def test_legends_use_labels_that_the_query_keeps() -> None:
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert not kept or label in re.split(r",\s*", kept[0]), target


def test_the_board_is_one_that_grafana_takes() -> None:
    found = board()
    assert found["schemaVersion"] >= 39 and found["uid"] == "tonle"
    assert [each["name"] for each in found["templating"]["list"]] == ["datasource", "model_name", "instance", "gateway"]
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy) for panel in panels
             for dx in range(panel["gridPos"]["w"]) for dy in range(panel["gridPos"]["h"])]  # fmt: skip
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap"
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Overview", "Latency", "Engine", "Cache", "Gateway and backends", "GPU and processes", "Audit and alerts",
    ]  # fmt: skip
    used = set(re.findall(r"\$(\w+)", " ".join(expressions()))) - {"__rate_interval"}
    assert used == {"model_name", "instance", "gateway"}
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_every_alert_says_what_it_is() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) >= 12
    for rule in found:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert not grouped or label in grouped, f"{rule['alert']}: no label {label}"


@pytest.mark.skipif(not FOLDER, reason="TONLE_K8S_SCHEMAS names no folder of schemas")
def test_the_groups_are_the_spec_of_a_prometheus_rule() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "grafana" / "alerts.yaml").read_text())["groups"]
    document = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "tonle"},
                "spec": {"groups": groups}}  # fmt: skip
    assert not validator()(document)


# -- tonle top


def tonle_top(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tonle", "top", *words], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "OPENAI_API_KEY": KEY, "COLUMNS": "100", **(env or {})}, check=False)  # fmt: skip


def test_top_shows_a_server(place: Place) -> None:
    done = tonle_top(place.server.url, "--once", "--json", "--interval", "0.2")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kind"] == "Tonle server" and figures["models"] == ["tiny"]
    assert figures["running"] == 0 and 0 <= figures["kv_usage"] <= 1 and figures["uptime_s"] > 0
    assert {each["name"] for each in figures["latencies"]} == {"TTFT", "ITL", "Total", "Queue"}
    assert {each["name"]: each["target_s"] for each in figures["targets"]} == {"e2e": 2.0, "ttft": 10.0, "itl": 10.0}


def test_top_shows_a_gateway_and_its_backends(place: Place) -> None:
    done = tonle_top(f"{place.gateway.url}/metrics", "--interval", "0.2")  # not a terminal: once
    assert done.returncode == 0, done.stderr
    assert "Tonle gateway" in done.stdout and "p95 targets" in done.stdout
    assert re.search(r"b\s+up\s+0\s+0", done.stdout), done.stdout


def test_top_says_what_is_wrong(place: Place) -> None:
    done = tonle_top(place.gateway.url, "--once", env={"OPENAI_API_KEY": "wrong"})
    assert done.returncode == 1 and "refuses the API key" in done.stderr, done.stderr


# -- the engine; last, for it dies


def test_an_engine_that_dies_is_alerted(place: Place) -> None:
    os.kill(place.server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: len(place.posts) >= 1)
    told = place.posts[0]
    assert told["type"] == "alert.firing" and (told["data"]["kind"], told["data"]["subject"]) == ("backend", "engine")
    assert told["data"]["summary"].startswith("the engine is dead: ")
    assert 'tonle:alerts_total{kind="backend"} 1.0' in place.scrape(place.server)


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to hold")
