"""The servers of the comparison, as data: what they are called, how they are started, what they need.

Does: find out which peers are installed (flag, then environment) and give the command of each.
Does not: start anything. A peer's model files are made when its command is first asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import files

LLAMA_SERVER = "PEER_LLAMA_SERVER"
OPENVINO_PYTHON = "PEER_OPENVINO_PYTHON"
VLLM_PYTHON = "PEER_VLLM_PYTHON"

NUM_SLOTS = 32  # requests computed together: the most users of any level
MAX_TOKENS_PER_SLOT = 1024  # holds 512 shared + 64 own + 64 new
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Server:
    """One line of the table."""

    name: str
    health: str  # answers 200 once requests are served
    command: Callable[[int], list[str]]  # from the port
    env: Mapping[str, str] = field(default_factory=dict)  # on top of ours


@dataclass(frozen=True, slots=True)
class Missing:
    """A peer that cannot be started here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where the peers are installed; None = not said."""

    llama_server: Path | None
    openvino_python: Path | None
    vllm_python: Path | None

    @classmethod
    def find(cls, llama_server: Path | None, openvino_python: Path | None, vllm_python: Path | None) -> Places:
        """What the flags say, else the environment, else (llama-server only) the search path."""
        on_path = shutil.which("llama-server")
        return cls(
            llama_server or _from_env(LLAMA_SERVER) or (Path(on_path) if on_path else None),
            openvino_python or _from_env(OPENVINO_PYTHON),
            vllm_python or _from_env(VLLM_PYTHON),
        )


def num_threads() -> int:
    """Cores this process may use; every server is told to use as many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ours() -> list[Server]:
    """Our own server, out of the environment that runs this script: as a user starts it, without guesses (speculative
    decoding, which the peers do not have), with 16-bit activations, and with float32 keys and values (by default they have
    8 bits, as OpenVINO's)."""
    start = [sys.executable, "-m", "tonle", "serve", "--port"]
    return [
        Server("tonle", "/health/ready", lambda port: [*start, str(port)]),
        Server("tonle-no-guesses", "/health/ready", lambda port: [*start, str(port), "--speculation", "off"]),
        Server("tonle-16bit", "/health/ready", lambda port: [*start, str(port), "--activation-bits", "16"]),
        Server("tonle-float32-kv", "/health/ready", lambda port: [*start, str(port), "--kv-cache-dtype", "float32"]),
    ]


def peers(places: Places) -> list[Server | Missing]:
    """Every peer we know, in the order of the table."""
    llama, openvino, vllm = places.llama_server, places.openvino_python, places.vllm_python
    return [
        _checked("llama-q8_0", llama, LLAMA_SERVER, lambda path: _llama("llama-q8_0", path, files.q8_gguf)),
        _checked("llama-q4_1", llama, LLAMA_SERVER, lambda path: _llama("llama-q4_1", path, _gguf_as_it_is)),
        _checked("openvino-int8", openvino, OPENVINO_PYTHON, lambda path: _openvino(path, "int8")),
        _checked("openvino-fp32", openvino, OPENVINO_PYTHON, lambda path: _openvino(path, "fp32")),
        _checked("vllm-fp32", vllm, VLLM_PYTHON, _vllm),
    ]


def _llama(name: str, llama_server: Path, model: Callable[[Path], Path]) -> Server:
    def command(port: int) -> list[str]:
        threads = str(num_threads())
        slots = ["-np", str(NUM_SLOTS), "-cb", "-c", str(NUM_SLOTS * MAX_TOKENS_PER_SLOT)]
        start = [str(llama_server), "-m", str(model(llama_server)), "-t", threads, "-tb", threads]
        return [*start, *slots, "--host", "127.0.0.1", "--port", str(port)]

    return Server(name, "/health", command)


def _gguf_as_it_is(_: Path) -> Path:
    return files.default_gguf()


def _openvino(python: Path, weights: str) -> Server:
    def command(port: int) -> list[str]:
        shim = HERE / "openvino_server.py"
        return [str(python), str(shim), str(files.openvino_folder(python, weights)), "--port", str(port)]

    return Server(f"openvino-{weights}", "/health", command)


def _vllm(python: Path) -> Server:
    def command(port: int) -> list[str]:
        serve = [str(python.with_name("vllm")), "serve", str(files.hf_folder(python)), "--dtype", "float32"]
        return [*serve, "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)]

    env = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads() - 1}"}
    return Server("vllm-fp32", "/health", command, env)


def _checked(name: str, path: Path | None, variable: str, make: Callable[[Path], Server]) -> Server | Missing:
    if path is None:
        flag = variable.removeprefix("PEER_").lower().replace("_", "-")
        return Missing(name, f"not set up: give --{flag} or {variable} (benchmarks/README.md says how to install it)")
    if not path.is_file():
        return Missing(name, f"there is no file {path}")
    return make(path.absolute())


def _from_env(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else None
