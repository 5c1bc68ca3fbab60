"""The documents in deploy/ are what the settings in deploy/examples render now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "deploy"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("render_examples", FOLDER / "render_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_up_to_date() -> None:
    rendered = script().rendered()
    stale = [str(path) for path, text in rendered.items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `make examples`"


def test_nothing_else_is_among_them() -> None:
    module = script()
    folders = {FOLDER / folder for folder, _, _ in module.EXAMPLES} | {FOLDER / "grafana"}
    files = {file for folder in folders for file in folder.rglob("*") if file.is_file()}
    by_hand = {FOLDER / "kserve" / "kustomization.yaml", FOLDER / "grafana" / "README.md"}
    assert files - by_hand == set(module.rendered())
    assert {file.stem for file in (FOLDER / "examples").glob("*.yaml")} >= {name for _, _, name in module.EXAMPLES}


def test_the_folder_for_kserve() -> None:
    """One service under three names of files: what runs it, the service, and llm-d's way to run the same."""
    kserve = FOLDER / "kserve"
    assert {file.name for file in kserve.iterdir()} == {
        "vllm-runtime.yaml", "kserve-inferenceservice.yaml", "llm-d-configuration.yaml", "kustomization.yaml",
    }  # fmt: skip
    [runtime] = yaml.safe_load_all((kserve / "vllm-runtime.yaml").read_text())
    [container] = runtime["spec"]["containers"]
    assert {"--gpu-memory-utilization=0.9", "--kv-cache-dtype=fp8"} <= set(container["args"])
    service, *_ = yaml.safe_load_all((kserve / "kserve-inferenceservice.yaml").read_text())
    assert (service["kind"], service["metadata"]["name"]) == ("InferenceService", "lean-rag-inference")
    predictor = service["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (1, 10)
    assert "rate(vllm:request_success_total" in str(predictor["autoScaling"])
    resources = predictor["model"]["resources"]
    assert resources["requests"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert resources["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    llm_d = list(yaml.safe_load_all((kserve / "llm-d-configuration.yaml").read_text()))
    scaled = [each["spec"]["scaleTargetRef"]["name"] for each in llm_d if each["kind"] == "ScaledObject"]
    assert scaled == ["lean-rag-inference-prefill", "lean-rag-inference-decode"]
