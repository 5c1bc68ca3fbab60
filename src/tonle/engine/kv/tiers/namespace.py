"""The namespace of stored KV blocks: 16 bytes that are the same only if the same model computes the same bits.

Does: hash the model's files (or a live model's weights), its description, the precision, the device, the libraries and this
package's own kernels. So nothing is ever read that another model, precision, device or version has written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import tonle.models
from tonle.config.gguf_parts import all_parts
from tonle.models.source import ModelSource

log = logging.getLogger("tonle.engine")

_READ_BYTES = 8 * 2**20
_WEIGHT_FILES = ("*.safetensors", "*.json", "*.gguf")


def namespace_of(model_digest: bytes, facts: Iterable[object]) -> bytes:
    """`facts`: whatever else decides the bits of keys and values; their `repr` counts."""
    digest = blake2b(model_digest, digest_size=16, person=b"tonle-kv-tier")
    for fact in (torch.__version__, _own_kernels(), *facts):
        digest.update(repr(fact).encode() + b"\0")
    return digest.digest()


def digest_of_model(model: ModelSource | Any) -> bytes:
    """Of all that its files hold, or of the weights of a live model."""
    began = time.monotonic()
    digest = blake2b(digest_size=16)
    if isinstance(model, ModelSource):
        files = (
            all_parts(model.path)
            if model.path.is_file()
            else sorted({p for like in _WEIGHT_FILES for p in model.path.glob(like)})
        )
        with ThreadPoolExecutor(4) as pool:
            for file, found in zip(files, pool.map(_digest_of_file, files), strict=True):
                digest.update(file.name.encode() + b"\0" + found)
    else:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    log.info("the model's digest, which names its stored KV blocks, took %.1f s", time.monotonic() - began)
    return digest.digest()


def _digest_of_file(path: Path) -> bytes:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()


def _own_kernels() -> bytes:
    """Of the code that computes."""
    digest = blake2b(digest_size=16)
    folder = Path(tonle.models.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.digest()
