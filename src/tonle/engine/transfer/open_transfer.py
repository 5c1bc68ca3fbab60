"""`open_transfer`: the parts by which an engine gives keys and values to others and takes theirs, as its role says."""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from tonle.config.engine import EngineConfig
from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.kv.incoming import Incoming
from tonle.engine.schedule import Scheduler
from tonle.engine.transfer.block_server import BlockServer, listen
from tonle.engine.transfer.leases import Leases
from tonle.engine.transfer.remote_source import RemoteSource
from tonle.engine.transfer.wire import CacheLayout
from tonle.errors import ConfigError
from tonle.models.inputs import KVCache
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.engine")

_SAMPLED_BYTES = 64 * 1024  # of each end of a file


class Transfer(NamedTuple):
    """Either may be None."""

    incoming: Incoming | None
    server: BlockServer | None


def open_transfer(
    model: ModelSource | Any, config: EngineConfig, spec: ModelSpec, kv: KVCache, scheduler: Scheduler
) -> Transfer:
    """Raises `ConfigError`."""
    if config.role is None:
        return Transfer(None, None)
    if not isinstance(model, ModelSource):
        raise ConfigError(
            "role needs a model that is read from files, so that engines can tell whether theirs is the same; give a path",
            param="role",
        )
    if config.tensor_parallel_size > 1:  # each process has a part of each block, and only one is asked
        raise ConfigError(
            "role is for a model on one device; leave tensor_parallel_size at 1, and start more servers", param="role"
        )
    copies, timeout_s = BlockCopies(kv), config.kv_transfer_timeout_s
    layout = CacheLayout(
        model=model_digest(model, spec, config),
        dtype=str(kv.k.dtype).removeprefix("torch."),
        block_size=kv.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_bytes=copies.block_bytes,
    )
    incoming, server = None, None
    if config.role != "prefill":
        source = RemoteSource(copies, layout, timeout_s=timeout_s)
        incoming = Incoming(copies, [source], scheduler, timeout_s=timeout_s)
    if config.role != "decode":
        listener = listen(config.kv_transfer_host, config.kv_transfer_port)
        port = listener.getsockname()[1]
        leases = Leases(
            block_size=kv.block_size, duration_s=config.kv_lease_s, engine_id=secrets.token_hex(16),
            host=config.kv_transfer_host, port=port,
        )  # fmt: skip
        server = BlockServer(listener, leases, copies, layout, timeout_s=timeout_s)
        log.info(
            "prompts computed here can be fetched at %s:%d for %g s", config.kv_transfer_host, port, config.kv_lease_s
        )
    return Transfer(incoming, server)


def model_digest(source: ModelSource, spec: ModelSpec, config: EngineConfig) -> str:
    """Equal where the same files compute the same. Both ends of each file stand for the whole of it."""
    digest = hashlib.blake2b(f"{spec!r} {config.load_format} {config.quantization}".encode(), digest_size=16)
    if config.load_format == "auto":
        files = [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
        for file in files:
            digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_SAMPLED_BYTES)
        opened.seek(max(0, size - _SAMPLED_BYTES))
        return f"{size} ".encode() + first + opened.read(_SAMPLED_BYTES)
