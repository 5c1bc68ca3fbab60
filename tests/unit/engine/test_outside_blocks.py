"""What joins transfers, tiers and events to the loop: all of it ends, also where a part of it cannot begin or end."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes.checkpoints import save_folder, tiny_model
from tests.fakes.driver import Driver
from tonle.bench.server_process import free_port
from tonle.config.engine import EngineConfig
from tonle.engine.outside_blocks import OutsideBlocks
from tonle.errors import ConfigError
from tonle.models.source import resolve


class Part:
    def __init__(self, *, fails: bool = False) -> None:
        self.is_closed = False
        self.fails = fails

    def close(self) -> None:
        self.is_closed = True
        if self.fails:
            raise OSError("it cannot be closed")


def test_nothing_stays_open_if_a_later_part_cannot_be_opened(tmp_path: Path) -> None:
    save_folder("llama", tmp_path)
    port = free_port()
    config = EngineConfig(device="cpu", role="prefill", kv_transfer_host="127.0.0.1", kv_transfer_port=port,
                          kv_offload_memory=1)  # fmt: skip
    with pytest.raises(ConfigError, match="holds no KV block"):
        Driver(resolve(tmp_path), config)
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-tier")]


def test_all_parts_are_closed_though_some_cannot_be() -> None:
    loop = Driver(tiny_model("llama")).loop
    incoming, events, compiler, ranks = parts = [Part(fails=number < 3) for number in range(4)]
    loop._outside = OutsideBlocks(loop._scheduler, incoming=cast(Any, incoming), events=cast(Any, events))
    loop._compiler, loop._ranks = cast(Any, compiler), cast(Any, ranks)
    loop._stopped = True
    with pytest.raises(OSError, match="cannot be closed"):
        loop.run()
    assert all(part.is_closed for part in parts)
