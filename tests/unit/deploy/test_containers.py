"""The Dockerfiles: rules that hold for each, what the gateway's image installs, and (on demand) a replay of each.

A replay installs the image's packages into a fresh environment, takes minutes and needs a package index:

    REPLAY_DOCKERFILES=1 make test ARGS="tests/unit/deploy/test_containers.py -k replay"

REPLAY_TORCH_INDEX names the index of torch without CUDA, if it is not PyTorch's own; REPLAY_PYTHON the base image's Python, which
other users must be able to run if the container's user is to be replayed, too (by root).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tonle
from tests.fakes.dockerfile import Instruction, Replay, Stage, read
from tonle.bench.server_process import free_port
from tonle.models import default_model
from tonle.models.source import cached_models, resolve

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile*"))
SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def all_instructions(path: Path) -> list[Instruction]:
    return [each for stage in read(path) for each in stage.instructions]


def complaints(path: Path) -> list[str]:
    """What a builder would accept and we do not."""
    stages = read(path)
    found = [f"FROM {stage.base}: give a version, not a tag that moves" for stage in stages
             if not re.fullmatch(r"[a-z0-9./-]+:[0-9][\w.-]*", stage.base)]  # fmt: skip
    for each in all_instructions(path):
        names = [pair.partition("=")[0] for pair in each.text.split()] if each.word in ("ENV", "ARG") else []
        if any(SECRET.search(name) for name in names):
            found.append(f"line {each.line}: a secret in {each.word} is in the image for good")
        if each.word == "ADD":
            found.append(f"line {each.line}: ADD fetches and unpacks; use COPY")
        if each.word in ("ENTRYPOINT", "CMD") and not each.is_exec_form:
            found.append(f"line {each.line}: {each.word} in shell form: SIGTERM would reach a shell, not the server")
        if each.word == "RUN" and re.search(r"\b(sudo|curl|wget)\b", each.text):
            found.append(f"line {each.line}: {each.text.split()[0]} is not needed to install a package")
    final = stages[-1]
    users = final.all("USER")
    if not users or _default(final, users[-1].text) != "10001:10001":
        found.append("the last stage must end as USER 10001:10001")
    if len(stages) < 2:
        found.append("build tools belong in a stage of their own")
    if not final.all("HEALTHCHECK") or "/health/ready" not in final.last("HEALTHCHECK").text:
        found.append("no HEALTHCHECK of /health/ready")
    labels = " ".join(each.text for each in final.all("LABEL"))
    found += [f"no label {name}" for name in ("title", "version", "revision", "licenses")
              if f"org.opencontainers.image.{name}=" not in labels]  # fmt: skip
    return found


def _default(stage: Stage, text: str) -> str:
    """With the defaults of the stage's arguments."""
    for each in stage.all("ARG"):
        name, _, value = each.text.partition("=")
        text = text.replace(f"${name}", value)
    return text


def test_there_are_three() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda", "Dockerfile.gateway"]


@each_dockerfile
def test_a_dockerfile_keeps_the_rules(path: Path) -> None:
    assert complaints(path) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("FROM python:3.11-slim-bookworm\n", "FROM python:latest\n", "tag that moves"),
        ("USER 10001:10001\n", "", "USER 10001"),
        ('ENTRYPOINT ["tonle"]', "ENTRYPOINT tonle", "SIGTERM"),
        ("HOME=/cache", "HOME=/cache TONLE_API_KEY=abc", "secret in ENV"),
        ("COPY src ./src", "ADD https://example.com/src.tar.gz ./src", "ADD"),
        ("/health/ready", "/", "HEALTHCHECK"),
    ],
)
def test_a_dockerfile_that_breaks_a_rule_is_found(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    text = (FOLDER / "Dockerfile.gateway").read_text()
    assert old in text
    (tmp_path / "Dockerfile").write_text(text.replace(old, new))
    assert [found for found in complaints(tmp_path / "Dockerfile") if complaint in found]


@each_dockerfile
def test_what_is_copied_is_in_the_build_context(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines  # all else stays out
    sent = {line[1:] for line in lines if line.startswith("!")}
    for each in all_instructions(path):
        if each.word == "COPY" and "from" not in each.flags:
            for source in each.text.split()[:-1]:
                assert source in sent and (ROOT / source).exists(), f"line {each.line}: {source}"


@each_dockerfile
def test_versions_are_those_of_the_package(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(each.text.split("=", 1) for each in all_instructions(path) if each.word == "ARG")
    assert arguments["VERSION"] == tonle.__version__
    assert f"tonle:{tonle.__version__}" in path.read_text()
    if path.name != "Dockerfile.gateway":
        low, high = re.findall(r"\d+\.\d+", next(line for line in project["dependencies"] if line.startswith("torch")))
        version = re.findall(r"==(\d+)\.(\d+)", arguments["TORCH"])[0]
        assert _numbers(low) <= tuple(map(int, version)) < _numbers(high)
        assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_an_image_has_the_default_model_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume over the cache hides what the image has there; this place it does not hide."""
    monkeypatch.setenv("TONLE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    place = default_model.path(tmp_path / "venv" / "share" / "tonle")
    assert (
        f"TONLE_CACHE_DIR=/opt/{place.parents[3].name.replace('venv', 'tonle')}/share/tonle tonle pull"
        in (FOLDER / "Dockerfile").read_text()
    )
    assert default_model.find(tmp_path / "empty") == default_model.path(tmp_path / "empty")  # where `fetch` puts it
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(default_model._FILE_BYTES)
    assert resolve(None).path == place
    assert [source.path for source in cached_models() if source.name == default_model.NAME] == [place]


# -- what the gateway's image installs


def requirements(text: str) -> dict[str, str]:
    """Ranges by name, without extras and markers."""
    lines = [line.split(";")[0].strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [re.fullmatch(r"([A-Za-z0-9_.-]+)(\[[a-z,]+\])?(.*)", line) for line in lines]
    return {match[1].lower().replace("_", "-"): match[3] for match in found if match}


_LOADED = """
import atexit, importlib.metadata, json, sys, tonle.cli
def tell():
    names = importlib.metadata.packages_distributions()
    tops = {name.partition(".")[0] for name in sys.modules}
    open(report, "w").write(json.dumps(sorted({each for top in tops for each in names.get(top, ())})))
report = sys.argv.pop()
atexit.register(tell)
tonle.cli.main()
"""


def test_the_gateways_list_is_what_a_gateway_loads(tmp_path: Path) -> None:
    listed = requirements((FOLDER / "requirements-gateway.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = requirements("\n".join([*project["dependencies"], *extras]))
    assert listed == {name: declared[name] for name in listed}, "ranges differ from pyproject.toml"

    settings, report = tmp_path / "tonle.yaml", tmp_path / "loaded.json"
    settings.write_text(f"backends: [http://127.0.0.1:9]\napi_key: [k]\naudit_dir: {tmp_path / 'audit'}\n")
    loaded = loaded_by_a_gateway(settings, report)
    needed = {name for name in (each.lower().replace("_", "-") for each in loaded) if name in declared}
    assert {"httptools", "msgspec", "pyyaml"} <= needed
    optional = {"redis", "asyncpg", "cryptography", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    assert needed - optional == set(listed) - optional
    assert "torch" not in loaded


def loaded_by_a_gateway(settings: Path, report: Path) -> list[str]:
    """Names of packages that `tonle gateway` has imported when it ends, after a few requests."""
    port = free_port()
    command = [sys.executable, "-c", _LOADED, "gateway", "--config", str(settings), "--port", str(port), str(report)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for(process, lambda: status_of(port, "/health/live") == 200)
        assert status_of(port, "/v1/models", key="k") == 200
        assert status_of(port, "/metrics", key="k") == 200
        assert status_of(port, "/v1/chat/completions", key="k", body=b'{"model": "m", "messages": []}') in (400, 404)
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return json.loads(report.read_text())  # type: ignore[no-any-return]


def status_of(port: int, path: str, *, key: str | None = None, body: bytes | None = None) -> int | None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        try:
            connection.request(
                "GET" if body is None else "POST", path, body, headers | {"Content-Type": "application/json"}
            )
            return connection.getresponse().status
        except OSError:
            return None


def wait_for(
    process: subprocess.Popen[bytes], condition: object, timeout_s: float = 60, log: Path | None = None
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert process.poll() is None and time.monotonic() < deadline, log.read_text() if log else "it ended or is late"
        time.sleep(0.05)


def test_what_the_gateways_image_cannot_do_is_told(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tokenizers'] = None; import tonle.cli; tonle.cli.main()"
    (tmp_path / "config.json").write_text("{}")
    ended = subprocess.run([sys.executable, "-c", code, "serve", "--port", "0", str(tmp_path)], capture_output=True,
                           text=True, check=False, timeout=60)  # fmt: skip
    assert ended.returncode == 1 and "tokenizers is not installed" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


# -- a replay of each


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: the image's user must be able to enter it."""
    made = Path(tempfile.mkdtemp(prefix="replay-"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o1777)
    yield made
    shutil.rmtree(made)


def build(folder: Path, name: str, **arguments: str) -> tuple[Replay, Stage]:
    if not os.environ.get("REPLAY_DOCKERFILES"):
        pytest.skip("takes minutes and a package index; set REPLAY_DOCKERFILES=1")
    replay = Replay(folder, ROOT, arguments=arguments)
    return replay, replay.build(read(FOLDER / name))


def torch_arguments() -> dict[str, str]:
    index = os.environ.get("REPLAY_TORCH_INDEX")
    return {"TORCH_INDEX": index} if index else {}


@contextlib.contextmanager
def container(replay: Replay, stage: Stage, folder: Path, *extra: str, **variables: str) -> Iterator[int]:
    """The image's own command as a process, healthy by the image's own check. Yields its port; then SIGTERM ends it."""
    port, log = free_port(), folder / "container.log"
    log.touch()
    variables |= {
        "TONLE_HOST": "127.0.0.1",
        "TONLE_PORT": str(port),
        "TMPDIR": str(folder / "tmp"),
        "PIP_NO_INDEX": "1",
    }
    command = stage.last("ENTRYPOINT").command() + (list(extra) or stage.last("CMD").command())
    process = replay.start(command, log, **variables)

    def healthy() -> bool:
        check = replay.start(stage.last("HEALTHCHECK").command(), folder / "health.log", **variables)
        return check.wait(60) == 0

    try:
        assert not healthy()  # it cannot be yet
        wait_for(process, healthy, 300, log)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert not healthy()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def chat(port: int, key: str | None = None) -> int | None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return status_of(port, "/v1/chat/completions", key=key, body=json.dumps(body).encode())


@pytest.mark.timeout(1200)
def test_replay_of_the_server(folder: Path) -> None:
    replay, stage = build(folder, "Dockerfile", **torch_arguments())
    with container(replay, stage, folder) as port:
        assert chat(port) == 200  # the default model, which came with the image: PIP_NO_INDEX is set
    if replay.has_user:  # it ran as another user, to whom the rest of the image is read-only
        outside = [path for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_uid == 10001]
        assert outside and all(path.is_relative_to(replay.root / "cache") for path in outside)


@pytest.mark.timeout(1200)
def test_replay_of_the_gateway(folder: Path) -> None:
    from tests.fakes.server import tonle_serve

    replay, stage = build(folder, "Dockerfile.gateway")
    assert not list(replay.root.glob("opt/tonle/lib/python*/site-packages/torch"))
    with tonle_serve() as server:
        flags = ["gateway", "--backend", server.url, "--audit-dir", str(replay.root / "cache/audit")]
        with container(replay, stage, folder, *flags, TONLE_API_KEY="k") as port:
            assert chat(port) == 401
            assert chat(port, "k") == 200
            assert status_of(port, "/metrics", key="k") == 200
        assert list((replay.root / "cache/audit").iterdir())


@pytest.mark.timeout(1200)
def test_replay_of_the_cuda_image(folder: Path) -> None:
    """With torch for CPUs in place of the one with CUDA, and RunPod's SDK: all but that wheel and the GPU."""
    cpu = next(each.text for each in all_instructions(FOLDER / "Dockerfile") if each.text.startswith("TORCH="))
    replay, stage = build(folder, "Dockerfile.cuda", TORCH=cpu.removeprefix("TORCH="), EXTRAS="runpod")
    with container(replay, stage, folder) as port:
        assert chat(port) == 200
    worker = replay.start(
        ["python", "-c", "import runpod.serverless, tonle.deploy.runpod_worker"], folder / "worker.log"
    )
    assert worker.wait(60) == 0, (folder / "worker.log").read_text()
