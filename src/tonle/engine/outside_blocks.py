"""`OutsideBlocks`: KV blocks beyond the device, as the loop sees them: those that come from elsewhere, that are kept for other
engines, that were evicted, and what is told of all blocks.

Does: call each of these parts at its moment of a step; a part that is None is off. Does not: move a byte, or decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tonle.config.engine import EngineConfig
from tonle.config.kv_events import read_kv_events
from tonle.engine.adapters.loaded_adapters import LoadedAdapters
from tonle.engine.kv.incoming import POLL_S, Incoming
from tonle.engine.kv.kv_events import KvEvents
from tonle.engine.kv.tiers.open_tiers import AnyDecoder, open_tiers
from tonle.engine.kv.tiers.tiers import KvTiers
from tonle.engine.messages import LoopStats
from tonle.engine.schedule import Scheduler, StepOutcome
from tonle.engine.transfer.block_server import BlockServer
from tonle.engine.transfer.leases import POLL_S as LEASES_POLL_S
from tonle.engine.transfer.open_transfer import open_transfer
from tonle.engine.transfer.transfer_stats import transfer_stats
from tonle.errors import ConfigError
from tonle.models.inputs import KVCache
from tonle.models.source import ModelSource

_LOAD_S = 10.0  # longest that a request waits for its prefix; then it is computed


class OutsideBlocks:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        incoming: Incoming | None = None,
        tiers: KvTiers | None = None,
        block_server: BlockServer | None = None,
        events: KvEvents | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._incoming = scheduler.incoming = incoming  # blocks of prefixes; None: every prompt is computed here
        self._tiers = tiers  # where evicted blocks go; also a source of `incoming`
        self._block_server = block_server  # None: no blocks are kept for other engines
        self._leases = None if block_server is None else block_server.leases
        self._events = scheduler.pool.observer = events  # of cached blocks; None: nobody is told

    def begin(self, kernel_changes: int, seconds_per_token: Callable[[], float]) -> None:
        """`seconds_per_token`: how long the engine takes to compute one of a prompt, by what it has seen."""
        if self._tiers is not None:
            self._tiers.use_kernels(kernel_changes)
            self._tiers.seconds_per_token = seconds_per_token

    def use_kernels(self, kernel_changes: int) -> None:
        """Blocks that are computed from now on are none of those before."""
        if self._tiers is not None:
            self._tiers.use_kernels(kernel_changes)

    # -- in the order of a step

    def shorten(self, wait_s: float | None) -> float | None:
        """How long the loop may sleep (None: until a message comes) while something is on its way here or from here."""
        if self._incoming is not None and self._incoming.is_busy:
            wait_s = POLL_S if wait_s is None else min(wait_s, POLL_S)
        if self._leases:
            wait_s = LEASES_POLL_S if wait_s is None else min(wait_s, LEASES_POLL_S)
        return wait_s

    def before_plan(self) -> bool:
        """Write what came, free what nobody fetches any more. True if anything was freed."""
        if self._incoming is not None and self._incoming.is_busy:
            self._incoming.advance()
        ended = self._leases.take_ended(time.monotonic()) if self._leases else []
        for handle in ended:
            self._scheduler.end_lease(handle)
        return bool(ended)

    def before_launch(self) -> None:
        """The plan may overwrite blocks that it evicted."""
        if self._tiers is not None:
            self._tiers.save_evicted()

    def committed(self, outcome: StepOutcome) -> None:
        """Others may fetch the blocks of `outcome.leased` from now on: the step that filled them has been read."""
        if not outcome.leased:
            return
        assert self._leases is not None, "blocks are kept for nobody"
        for request in outcome.leased:
            blocks = self._scheduler.leases[request.handle]
            outcome.kept[request.handle] = self._leases.grant(request, blocks, time.monotonic())

    def after_step(self) -> None:
        if self._events is not None:
            self._events.flush()

    # -- at other times

    def clear(self) -> None:
        """Forget what is in host memory."""
        if self._tiers is not None:
            self._tiers.clear()

    def release_memory(self) -> None:
        if self._tiers is not None:
            self._tiers.release_memory()

    def note(self, stats: LoopStats) -> None:
        if self._tiers is not None:
            stats.kv_tiers = self._tiers.counts
        if self._events is not None:
            stats.kv_event_batches, stats.kv_event_batches_lost = self._events.num_sent, self._events.num_lost
        if self._incoming is not None or self._leases is not None:
            stats.transfers = transfer_stats(self._scheduler, self._incoming, self._leases)

    def close(self) -> None:
        with ExitStack() as parts:  # all of them, also if one cannot be closed
            for part in (self._incoming, self._block_server, self._events):
                if part is not None:
                    parts.callback(part.close)


def open_outside_blocks(
    model: ModelSource | Any, config: EngineConfig, decoder: AnyDecoder, kv: KVCache, scheduler: Scheduler,
    adapters: LoadedAdapters | None,
) -> OutsideBlocks:  # fmt: skip
    """As the settings ask for it. Raises `ConfigError`."""
    if not config.reuses_prefixes and (config.offloads_kv or config.kv_events_config):
        raise ConfigError("KV events and KV tiers are about cached prefixes, and prefix caching is off: switch it on, or leave "
                          "kv_events_config and kv_offload_… out", param="enable_prefix_caching")  # fmt: skip
    with ExitStack() as opened:  # closed again if one after them cannot be opened
        transfer = open_transfer(model, config, decoder.spec, kv, scheduler)
        if transfer.server is not None:
            opened.callback(transfer.server.close)
        incoming, tiers = transfer.incoming, None
        if config.offloads_kv:
            tiers = open_tiers(model, decoder, kv, scheduler.pool, config)
            opened.callback(tiers.close)
            incoming = incoming or Incoming(tiers.copies, [], scheduler, timeout_s=_LOAD_S)
            incoming.sources.append(tiers)
        events = _kv_events(config, kv.block_size, adapters)
        opened.pop_all()
    return OutsideBlocks(scheduler, incoming=incoming, tiers=tiers, block_server=transfer.server, events=events)


def _kv_events(config: EngineConfig, block_size: int, adapters: LoadedAdapters | None) -> KvEvents | None:
    """None where nobody is to be told which blocks are cached."""
    if (wanted := read_kv_events(config.kv_events_config)) is None:
        return None
    try:
        from tonle.engine.kv.event_publisher import EventPublisher
    except ImportError:
        raise ConfigError(
            "kv_events_config needs the package pyzmq: pip install 'tonle[kv-events]'", param="kv_events_config"
        ) from None

    def adapter_name(number: int) -> str:
        return "" if adapters is None else adapters.host.name(number)

    return KvEvents(EventPublisher(wanted), block_size, adapter_name)
