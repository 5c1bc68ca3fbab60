"""docs/deploy.md: its settings files can be rendered as it says, and its table of settings is whole and true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.deploy.matrix import workload_of
from tests.unit.deploy.schemas import FOLDER, validator
from tonle.cli.app import app
from tonle.config.deploy import DEPLOY_SETTINGS
from tonle.deploy.render import KINDS, render
from tonle.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
COMMAND = r"    tonle deploy render [^#|\n]*"

VLLM = {"engine": "vllm", "gpu": "L4"}
# For each setting, values beside it and a value that is not its default: which kinds of documents change?
CHANGES: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "name": [({}, "other")],
    "namespace": [({}, "models")],
    "storage_uri": [({}, "hf://org/other-7B")],
    "model_cache": [({}, 2**36)],
    "gateway": [({}, "mine")],
    "allowed_namespaces": [({}, ("gateways",))],
    "discovered_by": [({}, "gateways/tonle")],
    "data_center": [({}, "US-KS-2")],
    "engine": [({"gpu": "L4"}, "vllm")],
    "image": [({}, "registry.example/tonle:1")],
    "gpu": [({}, "L4")],
    "gpus": [(VLLM, 2)],
    "cpu": [({}, 32)],
    "cpu_limit": [({}, 3)],
    "memory": [({}, 2**36)],
    "memory_limit": [({}, 2**36)],
    "parameters": [({}, "6B")],
    "pod_monitor": [({}, True)],
    "spread": [({}, False)],
    "min_replicas": [({}, 2), ({"autoscaler": "none"}, 2)],
    "max_replicas": [({}, 5), ({"autoscaler": "hpa"}, 5)],
    "scale_on": [({}, "queue"), ({"autoscaler": "hpa"}, "queue")],
    "requests_per_second": [({}, 1.0), ({"autoscaler": "hpa"}, 1.0)],
    "waiting_requests": [({}, 2), ({"autoscaler": "hpa"}, 2), ({"scale_on": "queue"}, 2)],
    "autoscaler": [({}, "none"), ({}, "hpa")],
    "prefill_replicas": [(VLLM, 1)],
    "max_prefill_replicas": [(VLLM | {"prefill_replicas": 1}, 3)],
    "prometheus_url": [({}, "http://elsewhere"), ({"autoscaler": "hpa"}, "http://elsewhere")],
    "api_key_secret": [({"pod_monitor": True}, "keys"), (VLLM | {"pod_monitor": True}, "keys")],
    "hub_token_secret": [({}, "hub")],
}


def rows() -> list[list[str]]:
    """Of the table of settings: name, default, kinds, meaning."""
    table = re.search(r"\| setting \| default \| kinds .*?\n\n", PAGE, re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.group().rstrip().splitlines()[2:]]


def test_the_table_of_settings_is_whole_and_has_their_defaults() -> None:
    shown = {name.strip("`"): default.strip("`") for name, default, _, meaning in rows() if meaning}
    assert shown == {name: each.type.show(each.default) or "all" for name, each in DEPLOY_SETTINGS.items()}


def files_of(kind: str, deploy: dict[str, Any]) -> object:
    try:
        files = render(kind, workload_of({"model": "org/some-7B", "max_model_len": 2048}, deploy))
    except ConfigError:
        return None  # refused
    return [(file.name, file.documents, file.body) for file in files]


def test_a_setting_acts_on_the_kinds_that_the_table_names() -> None:
    assert set(CHANGES) == set(DEPLOY_SETTINGS)
    for name, _, kinds, _ in rows():
        setting = DEPLOY_SETTINGS[name.strip("`")]
        changed = []
        for kind in KINDS:
            for base, value in CHANGES[setting.name]:
                before, after = files_of(kind, base), files_of(kind, base | {setting.field: value})
                if before is not None and after is not None and before != after:
                    changed.append(kind)
                    break
        assert (list(KINDS) if kinds == "all" else kinds.split(", ")) == changed, setting.name


def steps() -> Iterator[tuple[dict[str, Any], str]]:
    """Each command of the page that renders, with the settings file as it is by then: blocks add to it."""
    settings: dict[str, Any] = {}
    for found in re.finditer(rf"(?m)^    # tonle\.yaml.*\n(?:    .*\n)+|^{COMMAND}", PAGE):
        text = dedent(found.group())
        if text.startswith("# tonle.yaml"):
            added = yaml.safe_load(text)
            section = settings.get("deploy", {}) | added.get("deploy", {})
            settings = settings | added | {"deploy": section}
        else:
            yield settings, text.strip()


def test_every_command_renders_and_every_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    errors, kinds = validator() if FOLDER else (lambda document: []), set()
    for settings, command in steps():
        Path("tonle.yaml").write_text(yaml.safe_dump(settings))
        words = shlex.split(command)[1:]
        kinds.add(words[2])
        done = CliRunner().invoke(app, [*words, "--force"])
        assert done.exit_code == 0, f"{command}: {done.stderr}"
        if "--output" in words:
            files = [Path(line.split()[1]) for line in done.stderr.splitlines()]
            assert files and all(file.is_file() for file in files), command
            texts = [file.read_text() for file in files if file.suffix == ".yaml" and words[2] != "compose"]
        else:
            texts = [done.stdout]
        documents = [document for text in texts for document in yaml.safe_load_all(text)]
        for document in documents:
            if "kind" in document:  # not the values of a chart
                assert errors(document) == [], command
        assert bool(documents) == (words[2] in ("kubernetes", "keda", "kserve", "llmisvc", "llm-d")), command
    assert kinds == set(KINDS)
    named = re.findall(r"(?:-f |-k |kustomize |644 |bash |\]\(\.\./)([\w./-]+)", PAGE)
    for path in (path for path in named if path != "-"):  # of the repository, or just written
        assert (ROOT / path).exists() or Path(path).exists(), path


def test_links_to_its_own_headings() -> None:
    headings = {re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
                for line in re.findall(r"(?m)^#+ (.*)", PAGE)}  # fmt: skip
    for link in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert link in headings, link
