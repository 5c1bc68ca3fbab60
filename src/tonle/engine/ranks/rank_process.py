"""A rank's process, but for rank 0: run as `python -m tonle.engine.ranks.rank_process CONTROL_FD`.

Does: load its part of the model, compute the steps that come, end with its parent. Does not: plan, sample, or answer: what it
computes goes into the sums of the group.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import msgspec
import torch

from tonle.child.frames import read_frame, write_frame
from tonle.child.hang_up import when_gone
from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings
from tonle.engine.messages import Failed
from tonle.engine.ranks.own_part import load_own_part, pool_bytes, rank_device
from tonle.engine.ranks.rank_messages import (
    AdapterParts,
    Begin,
    ComputeStep,
    Loaded,
    RankSettings,
    Ready,
    ReleaseCache,
    SentPart,
    ToRank,
    adapter_of,
)
from tonle.errors import CallerError
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.parallel.group import Group
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")


def main(control: socket.socket) -> int:
    ignore_signals()
    settings = read_settings(control, RankSettings)
    logs.configure(settings.log_level, json=settings.log_json)
    when_gone([control], lambda _: os._exit(0))  # whatever we do then: nobody waits for it
    torch.set_num_threads(settings.num_threads)
    if (device := rank_device(settings.config, settings.rank)).type == "cuda":
        torch.cuda.set_device(device)
    return serve_rank(control, settings)


def serve_rank(control: socket.socket, settings: RankSettings) -> int:
    """Load, then compute until the control socket closes. Returns an exit code."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(ToRank).decode
    try:
        decoder = load_own_part(settings.source, settings.config, settings.rank)
        write_frame(control, encode(Loaded(pool_bytes(decoder, settings.config))))
        if (body := read_frame(control)) is None:
            return 0
        begin = decode(body)
        assert isinstance(begin, Begin)
        rank = _Rank(decoder, begin, settings.config.block_size)
        write_frame(control, encode(Ready()))
    except Exception as error:
        write_frame(control, encode(_failed(error, settings.rank)))
        return 1
    try:
        rank.meet(settings)
        while (body := read_frame(control)) is not None:
            rank.handle(decode(body))
    except Exception:
        log.exception("rank %d ends", settings.rank)
        return 1
    return 0


def _failed(error: Exception, rank: int) -> Failed:
    if isinstance(error, CallerError):
        return Failed(f"rank {rank}: {error.message}", caller_fault=True)
    log.exception("rank %d could not start", rank)
    return Failed(f"rank {rank}: {type(error).__name__}: {error}", caller_fault=False)


class _Rank:
    def __init__(self, decoder: Decoder, begin: Begin, block_size: int) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._kv = KVCache(
            num_layers=spec.num_layers, num_blocks=begin.num_blocks, block_size=block_size,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=getattr(torch, begin.kv_dtype),
            device=decoder.device,
        )  # fmt: skip
        self._parts: list[SentPart] = []  # of an adapter that has not come whole
        if begin.num_adapter_slots:
            decoder.enable_adapters(begin.num_adapter_slots, begin.max_lora_rank)

    def meet(self, settings: RankSettings) -> None:
        """The other ranks."""
        size, store = settings.config.tensor_parallel_size, Path(settings.store)
        self._decoder.group = Group.connect(settings.rank, size, store, self._decoder.device, settings.timeout_s)

    @torch.inference_mode()
    def handle(self, message: ToRank) -> None:
        match message:
            case ComputeStep():
                self._decoder.forward(message.inputs(self._decoder.device), self._kv)
            case AdapterParts(slot, parts, is_last):
                self._parts += parts
                if is_last:
                    self._decoder.set_adapter(slot, adapter_of(self._parts))
                    self._parts = []
            case ReleaseCache():
                self._kv.release_memory()
            case Begin():
                raise AssertionError("it has begun already")


if __name__ == "__main__":
    sys.exit(main(*inherited_sockets()))
