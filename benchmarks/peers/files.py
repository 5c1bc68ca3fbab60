"""Model files for the peers, each made once from the default model's GGUF file and kept in the cache.

Does: Q8_0 for llama-server, a Hugging Face folder for vLLM, an OpenVINO export; a half-made file is never left behind.
Does not: download anything. Every form holds the weights of the same 4-bit file, so all servers run the same model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tonle.config.cache_dir import cache_dir
from tonle.models.source import resolve

HERE = Path(__file__).parent


class PreparationFailedError(Exception):
    """A tool that makes a model file failed; the message says which, with its last lines of output."""


def default_gguf() -> Path:
    """The file that `tonle serve` serves; fetched if it is not here."""
    return resolve(None).path


def q8_gguf(llama_server: Path) -> Path:
    """The weights again as Q8_0, made by the `llama-quantize` that was built beside `llama-server`."""
    source = default_gguf()
    quantize = llama_server.with_name("llama-quantize")

    def make(draft: Path) -> None:
        _run([str(quantize), "--allow-requantize", str(source), str(draft), "Q8_0"])

    return made_once(f"{source.name.split('.')[0]}.Q8_0.gguf", make)


def hf_folder(python: Path) -> Path:
    """The weights as float32 safetensors with config and tokenizer, made by the `transformers` of this interpreter."""
    source = default_gguf()

    def make(draft: Path) -> None:
        _run([str(python), str(HERE / "gguf_to_folder.py"), str(source), str(draft)])

    return made_once(f"{source.name.split('.')[0]}-float32", make)


def openvino_folder(python: Path, weights: str) -> Path:
    """OpenVINO's own form; `weights` is fp32, int8 or int4, as `optimum-cli` calls them."""
    folder = hf_folder(python)

    def make(draft: Path) -> None:
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
        _run([*command, "--task", "text-generation-with-past", "--weight-format", weights, str(draft)])

    return made_once(f"{folder.name.removesuffix('-float32')}-openvino-{weights}", make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file or folder of this name, made first if it is missing."""
    place = cache_dir() / "peers" / name
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f"draft.{os.getpid()}.{name}")
    print(f"making {place} (once)", flush=True)
    try:
        make(draft)
        draft.replace(place)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)
    return place


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise PreparationFailedError(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        tail = "\n    ".join((done.stdout + done.stderr).splitlines()[-12:])
        raise PreparationFailedError(f"{' '.join(command[:4])} … failed:\n    {tail}")
