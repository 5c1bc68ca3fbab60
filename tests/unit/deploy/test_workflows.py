"""The workflows of the repository's host, Kustomize and Argo CD: files that only others can run, checked as far as possible."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.examples import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
APPLICATIONS = sorted((ROOT / "deploy" / "argocd").glob("*.yaml"))
KUSTOMIZATIONS = sorted((ROOT / "deploy").rglob("kustomization.yaml"))
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")
UNTRUSTED = re.compile(r"\$\{\{[^}]*github\.(event|head_ref|ref_name|actor)")
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


class _Keys(yaml.SafeLoader):
    """`on` is a key here, not the truth value it is in YAML 1.1."""


_Keys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(path.read_text(), Loader=_Keys)
    return document


def steps(workflow: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            yield name, step


def test_there_are_three() -> None:
    assert [path.stem for path in WORKFLOWS] == ["publish", "render", "test"]


@each_workflow
def test_a_workflow_has_its_shape(path: Path) -> None:
    assert path.read_text().startswith("# Never run where this repository is developed")
    workflow = load(path)
    assert set(workflow) == {"name", "on", "permissions", "concurrency", "jobs"}
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}, "jobs ask for more where they need it"
    assert "group" in workflow["concurrency"]
    known = {"needs", "runs-on", "timeout-minutes", "strategy", "env", "steps", "permissions", "environment"}
    for name, job in workflow["jobs"].items():
        assert set(job) <= known and {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        assert re.fullmatch(r"[a-z]+-\d+\.\d+", job["runs-on"]), "a version, not latest"
        needs = job.get("needs", [])
        assert {needs} <= set(workflow["jobs"]) if isinstance(needs, str) else set(needs) <= set(workflow["jobs"])


@each_workflow
def test_steps_are_pinned_and_safe(path: Path) -> None:
    for job, step in steps(load(path)):
        assert set(step) <= {"name", "uses", "run", "with", "env", "if", "id"}, step
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] == "false"
        if "run" in step:
            assert not UNTRUSTED.search(step["run"]), f"{job}: pass it in env: it would be run as a command"


@each_workflow
def test_commands_are_shell(path: Path) -> None:
    for job, step in steps(load(path)):
        if "run" in step:
            script = EXPRESSION.sub("expression", step["run"])
            checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
            assert checked.returncode == 0, f"{job}: {checked.stderr}"


@each_workflow
def test_what_a_workflow_names_is_there(path: Path) -> None:
    text = path.read_text()
    for file in set(re.findall(r"(?:deploy|tests|src)/[\w./-]+\.(?:py|sh|yaml|gateway|cuda)\b", text)):
        assert (ROOT / file).is_file(), file
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    for target in re.findall(r"\bmake ([a-z]+)", text):
        assert target in targets, target


def test_images_are_built_from_files_that_take_these_arguments() -> None:
    job = load(ROOT / ".github" / "workflows" / "publish.yml")["jobs"]["images"]
    for image in job["strategy"]["matrix"]["include"]:
        text = (ROOT / "deploy" / "docker" / image["file"]).read_text()
        assert f"EXPOSE {image['port']}" in text
        wanted = ["VERSION", "REVISION", *(["EXTRAS", "USER_ID"] if image["file"] != "Dockerfile.gateway" else [])]
        assert all(re.search(rf"(?m)^ARG {name}=", text) for name in wanted)
    assert {image["suffix"] for image in job["strategy"]["matrix"]["include"]} >= {"", "-cuda", "-gateway"}


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not installed")
def test_actionlint_has_nothing_to_say() -> None:
    subprocess.run(["actionlint", *WORKFLOWS], cwd=ROOT, check=True)


# -- Kustomize and Argo CD


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_refers_to_what_is_there(path: Path) -> None:
    made = load(path)
    assert made["kind"] == "Kustomization" and made["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert set(made) <= {"apiVersion", "kind", "namespace", "resources", "labels", "patches"}
    for resource in [*made["resources"], *(patch["path"] for patch in made.get("patches", []))]:
        target = path.parent / resource
        assert target.is_file() or (target / "kustomization.yaml").is_file(), f"{path}: {resource}"
        if target.is_file():  # Kustomize reads no file outside its folder
            assert target.resolve().is_relative_to(path.parent.resolve())


def test_a_patch_has_something_to_patch() -> None:
    """By kind and name, as Kustomize looks for it."""
    overlay = ROOT / "deploy" / "kustomize" / "production"
    base = [document for file in load(ROOT / "deploy" / "kserve" / "kustomization.yaml")["resources"]
            for document in yaml.safe_load_all((ROOT / "deploy" / "kserve" / file).read_text())]  # fmt: skip
    there = {(document["apiVersion"], document["kind"], document["metadata"]["name"]): document for document in base}
    for patch in load(overlay / "kustomization.yaml")["patches"]:
        wanted = yaml.safe_load((overlay / patch["path"]).read_text())
        found = there[wanted["apiVersion"], wanted["kind"], wanted["metadata"]["name"]]
        assert wanted["spec"]["predictor"]["minReplicas"] <= found["spec"]["predictor"]["maxReplicas"]


@pytest.mark.parametrize("path", APPLICATIONS, ids=lambda path: path.stem)
def test_an_application_points_at_a_folder_that_is_there(path: Path) -> None:
    made = load(path)
    assert (made["apiVersion"], made["kind"]) == ("argoproj.io/v1alpha1", "Application")
    source = made["spec"]["source"]
    folder = ROOT / source["path"]
    files = [folder / source["directory"]["include"]] if "directory" in source else [folder / "kustomization.yaml"]
    assert all(file.is_file() for file in files), source["path"]
    assert made["spec"]["syncPolicy"]["automated"] == {"prune": "true", "selfHeal": "true"}
    assert made["spec"]["destination"]["namespace"]


def test_kustomize_builds_it() -> None:
    kustomize = os_command()
    if kustomize is None:
        pytest.skip("neither kustomize nor a kubectl with a new enough one is installed")
    built = subprocess.run(
        [*kustomize, ROOT / "deploy" / "kustomize" / "production"], capture_output=True, text=True, check=True
    )
    documents = {document["kind"]: document for document in yaml.safe_load_all(built.stdout)}
    assert documents["InferenceService"]["spec"]["predictor"]["minReplicas"] == 2
    assert documents["InferenceService"]["metadata"]["namespace"] == "inference"


def os_command() -> list[str] | None:
    """Kustomize 4.1 or later has labels."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        told = subprocess.run(
            shlex.split("kubectl version --client --output=json"), capture_output=True, text=True, check=False
        )
        minor = re.search(r'"minor": "(\d+)', told.stdout)
        if minor and int(minor[1]) >= 22:
            return ["kubectl", "kustomize"]
    return None
