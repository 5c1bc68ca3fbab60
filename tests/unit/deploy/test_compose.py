"""`tonle deploy render compose`: what Compose reads, and that the server and the gateway start as it says and are watched."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import tonle_serve
from tests.unit.deploy.examples import ROOT, committed_and_rendered, files_of
from tests.unit.deploy.test_containers import status_of, wait_for
from tonle.bench.server_process import free_port
from tonle.deploy.compose import GATEWAY_PORT
from tonle.errors import ConfigError

OURS = ("server", "gateway")
ALL = (*OURS, "prometheus", "grafana")


def compose_of(folder: Path, **settings: Any) -> dict[str, Any]:
    text = files_of("compose", folder, **settings)["compose.yaml"].text
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def test_the_example_is_what_is_rendered() -> None:
    committed, rendered = committed_and_rendered("compose")
    assert committed == rendered


@pytest.mark.parametrize("service", ALL)
def test_a_service_can_do_no_more_than_it_must(tmp_path: Path, service: str) -> None:
    made = compose_of(tmp_path)["services"][service]
    assert made["read_only"] is True and made["tmpfs"] == ["/tmp"]
    assert made["cap_drop"] == ["ALL"] and made["security_opt"] == ["no-new-privileges:true"]
    assert made["restart"] == "unless-stopped"
    assert "privileged" not in made and "network_mode" not in made
    assert re.search(r":v?[0-9][\w.-]*}?$", made["image"]), "pinned"
    assert all(port.startswith(("127.0.0.1:", "${GATEWAY_ADDRESS:-127.0.0.1}:")) for port in made.get("ports", []))


def test_only_the_gateway_and_grafana_are_reached_from_outside(tmp_path: Path) -> None:
    services = compose_of(tmp_path)["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"gateway", "grafana"}


def test_volumes_secrets_and_files_are_there(tmp_path: Path) -> None:
    files = files_of("compose", tmp_path, deploy={"hub_token_secret": "hub"})
    compose = yaml.safe_load(files["compose.yaml"].text)
    made_by_script = set(re.findall(r"> (keys/[a-z.]+)", files["make-keys.sh"].text))
    named = {volume for service in compose["services"].values() for volume in service.get("volumes", [])}
    for source in {volume.split(":")[0] for volume in named}:
        inside = source.removeprefix("./")
        assert source in compose["volumes"] or any(name.startswith(inside) for name in files), source
    for service in compose["services"].values():
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        for file in service.get("env_file", []):
            assert file["path"].removeprefix("./") in made_by_script
    assert compose["secrets"]["metrics-key"]["file"].removeprefix("./") in made_by_script
    assert "keys/hub.env" in made_by_script


def test_it_has_the_time_to_drain(tmp_path: Path) -> None:
    services = compose_of(tmp_path, drain="90s")["services"]
    assert "--drain=90s" in services["server"]["command"] and "--drain=90s" in services["gateway"]["command"]
    for name in OURS:
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > 90


def test_a_gpu_is_reserved_where_one_is_asked_for(tmp_path: Path) -> None:
    assert "reservations" not in compose_of(tmp_path)["services"]["server"]["deploy"]["resources"]
    server = compose_of(tmp_path, model="org/x-7B", deploy={"engine": "vllm", "gpu": "A100", "gpus": 2})["services"][
        "server"
    ]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert server["image"].startswith("vllm/vllm-openai:") and server["entrypoint"] == ["vllm", "serve"]
    assert "user" not in server  # volumes of an image that is not ours belong to root


def test_a_model_of_this_machine_is_mounted(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny")
    server = compose_of(tmp_path, model=str(tmp_path / "tiny"))["services"]["server"]
    mount = {"type": "bind", "source": str(tmp_path / "tiny"), "target": "/mnt/models", "read_only": True}
    assert mount in server["volumes"]
    assert server["command"][0] == "/mnt/models" and "--served-model-name=tiny" in server["command"]


def test_dollars_are_not_variables_of_compose(tmp_path: Path) -> None:
    server = compose_of(tmp_path, served_model_name="cheap$HOME")["services"]["server"]
    assert "--served-model-name=cheap$$HOME" in server["command"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "org/x-1B", "deploy": {"storage_uri": "s3://bucket/x"}}, "cannot be read by Docker Compose"),
        ({"api_key": ["secret"]}, "must not be written into a document"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose_of(tmp_path, **settings)


def test_keys_are_drawn_once(tmp_path: Path) -> None:
    script = tmp_path / "make-keys.sh"
    script.write_text(files_of("compose", tmp_path)["make-keys.sh"].text)
    first = subprocess.run(["sh", script], capture_output=True, text=True, check=True)
    again = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "already there" in again.stderr
    keys = tmp_path / "keys"
    caller, metrics = (keys / "gateway.env").read_text().strip().removeprefix("TONLE_API_KEY=").split(",")
    assert caller in first.stdout and metrics not in first.stdout
    assert len(caller) == len(metrics) == 48 and caller != metrics
    assert (keys / "metrics.key").read_text() == metrics
    assert (keys.stat().st_mode & 0o777, (keys / "gateway.env").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.skipif(not shutil.which("docker"), reason="docker is not installed")
def test_compose_reads_it(tmp_path: Path) -> None:
    """The client alone: no daemon is asked."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose")
    for name, file in files_of("compose", tmp_path).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(file.text)
    subprocess.run(["sh", "make-keys.sh"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["docker", "compose", "config", "--quiet"], cwd=tmp_path, check=True)


# -- as it says: a server and a gateway


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What Prometheus gets from each job, after a request. The gateway runs as compose.yaml says."""
    folder = tmp_path_factory.mktemp("compose")
    save_folder("llama", folder / "tiny")
    gateway = compose_of(folder)["services"]["gateway"]
    port, log = free_port(), folder / "gateway.log"
    with tonle_serve(folder / "tiny", "--device", "cpu") as server:
        words = " ".join([*gateway["entrypoint"][1:], *gateway["command"]])
        words = words.replace("http://server:8000", server.url).replace("0.0.0.0", "127.0.0.1")
        words = words.replace(f"--port={GATEWAY_PORT}", f"--port={port}").replace("/cache/audit", str(folder / "audit"))
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "tonle", *words.split()], stdout=output,
                                       stderr=subprocess.STDOUT,
                                       env={**os.environ, "TONLE_API_KEY": "caller,metrics"})  # fmt: skip
        try:
            check = [word.replace(f", {GATEWAY_PORT},", f", {port},") for word in gateway["healthcheck"]["test"][1:]]
            assert check[0] == "python3"
            check[0] = sys.executable
            wait_for(process, lambda: not subprocess.run(check, capture_output=True, check=False).returncode, log=log)
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body,
                                headers={"Authorization": "Bearer caller"}, timeout=60)  # fmt: skip
            assert answer.status_code == 200
            assert status_of(port, "/metrics") == 401  # hence the secret in prometheus.yml
            yield {
                "server": httpx.get(f"{server.url}/metrics").text,
                "gateway": httpx.get(
                    f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer metrics"}
                ).text,
            }
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
    assert list((folder / "audit").iterdir())


def test_the_dashboard_is_that_of_deploy_grafana(tmp_path: Path) -> None:
    """tests/http/test_metrics.py compares what it names with what is measured."""
    made = json.loads(files_of("compose", tmp_path)["grafana/dashboards/tonle.json"].text)
    assert made == json.loads((ROOT / "deploy" / "grafana" / "tonle.json").read_text())


def test_both_are_scraped(tmp_path: Path, scrapes: dict[str, str]) -> None:
    document = yaml.safe_load(files_of("compose", tmp_path)["prometheus.yml"].text)
    assert {job["job_name"] for job in document["scrape_configs"]} == set(scrapes)
    assert "vllm:num_requests_running{" in scrapes["server"]
    assert "tonle:backend_up{" in scrapes["gateway"] and "vllm:" not in scrapes["gateway"]


def test_the_labels_of_the_dashboard_are_there(scrapes: dict[str, str]) -> None:
    line = next(line for line in scrapes["gateway"].splitlines() if line.startswith("tonle:gateway_requests_total{"))
    assert 'status="ok"' in line and "http_status=" in line
    for status in ("refused", "failed", "interrupted"):
        assert f'status="{status}"' in scrapes["gateway"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_reads_the_queries(tmp_path: Path) -> None:
    files = files_of("compose", tmp_path)
    config = files["prometheus.yml"].text.replace("/run/secrets/metrics-key", str(tmp_path / "key"))
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yml").write_text(config)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
    panels = json.loads(files["grafana/dashboards/tonle.json"].text)["panels"]
    targets = [target for panel in panels for target in panel.get("targets", [])]
    queries = [target["expr"].replace("$__rate_interval", "1m") for target in targets]
    rules = [{"record": f"r:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True, capture_output=True)
