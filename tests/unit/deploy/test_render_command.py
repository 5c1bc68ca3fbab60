"""`tonle deploy render`: quick, one stream or files, nothing replaced by accident."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.unit.cli.terminal import environment
from tonle.cli.app import app
from tonle.deploy.render import KINDS

KUBERNETES = ("kubernetes", "keda", "kserve", "llmisvc", "llm-d")


def render(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["deploy", "render", *args], env={"COLUMNS": "80", **variables})


def test_it_never_loads_torch() -> None:
    code = (
        "import sys; from tonle.cli.app import app\n"
        f"for kind in {KUBERNETES}:\n"
        "    assert app(['deploy', 'render', kind], standalone_mode=False) in (0, None)\n"
        "sys.exit(bool({'torch', 'transformers', 'tonle.engine', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), stdout=subprocess.DEVNULL).returncode == 0


def test_files_of_a_kind_are_one_stream() -> None:
    done = render("kserve", "--autoscaler", "none")
    assert done.exit_code == 0 and done.stderr == ""
    documents = list(yaml.safe_load_all(done.stdout))
    assert [document["kind"] for document in documents] == ["ServingRuntime", "InferenceService", "PodDisruptionBudget"]
    assert "# tonle-runtime.yaml\n" in done.stdout and "# kserve-inferenceservice.yaml\n" in done.stdout


def test_what_is_no_document_is_not_in_the_stream() -> None:
    done = render("kubernetes", "--autoscaler", "hpa")
    assert all("kind" in document for document in yaml.safe_load_all(done.stdout))
    assert "Not printed: prometheus-adapter-values.yaml." in done.stderr and "--output" in done.stderr


def test_files_are_replaced_when_asked_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    first = render("kserve", "--output", str(folder))
    assert first.exit_code == 0 and first.stdout == "" and first.stderr.count("wrote") == 2
    again = render("kserve", "-o", str(folder))
    assert again.exit_code == 0 and again.stderr.count("unchanged") == 2
    service, runtime = folder / "kserve-inferenceservice.yaml", folder / "tonle-runtime.yaml"
    service.write_text("# my own\n")
    runtime.unlink()
    refused = render("kserve", "-o", str(folder))
    assert refused.exit_code == 1 and "--force" in refused.stderr and service.name in refused.stderr
    assert service.read_text() == "# my own\n" and not runtime.exists(), "all or none"
    forced = render("kserve", "-o", str(folder), "--force")
    assert forced.exit_code == 0 and forced.stderr.count("wrote") == 2
    assert "InferenceService" in service.read_text()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "keda.yaml").mkdir(parents=True)
    for name, reason in (("file", "File exists"), ("folder", "Is a directory")):
        refused = render("keda", "--output", str(tmp_path / name))
        message = " ".join(refused.stderr.split())
        assert refused.exit_code == 1 and reason in message and "choose another --output" in message


def test_an_unknown_kind_is_told_the_kinds() -> None:
    done = render("nomad")
    assert done.exit_code == 1
    for kind in KINDS:
        assert kind in done.stderr


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tonle.yaml"
    file.write_text("deploy: {name: from-file, max_replicas: 3}")
    done = render("keda", "--config", str(file), "--name", "from-flag")
    [document] = yaml.safe_load_all(done.stdout)
    assert document["metadata"]["name"] == "from-flag" and document["spec"]["maxReplicaCount"] == 3


def test_variables_of_this_machine_do_not_show() -> None:
    plain = render("kubernetes")
    other = render("kubernetes", TONLE_MAX_NUM_SEQS="3", TONLE_CACHE_DIR="/elsewhere", TONLE_NAME="x")
    assert plain.exit_code == other.exit_code == 0 and plain.stdout == other.stdout


@pytest.mark.parametrize("args", [("--help",), ("render", "--help")])
def test_help_fits_a_terminal(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["deploy", *args], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "\\n" not in done.stdout and "…" not in done.stdout
    for kind in KUBERNETES if "render" in args else ():
        assert f"{kind}: " in done.stdout
