"""What is told of keys and values that come from elsewhere, and that are kept for others."""

from __future__ import annotations

from tonle.engine.kv.incoming import Incoming
from tonle.engine.messages import TransferStats
from tonle.engine.schedule import Scheduler
from tonle.engine.transfer.leases import Leases


def transfer_stats(scheduler: Scheduler, incoming: Incoming | None, leases: Leases | None) -> TransferStats:
    stats = TransferStats(
        num_loading=len(scheduler.loading),
        loaded_tokens=scheduler.loaded_tokens,
        num_leases=len(scheduler.leases),
        num_leased_blocks=scheduler.num_leased_blocks,
    )
    if incoming is not None:
        stats.loaded, stats.failed = dict(incoming.num_loaded), dict(incoming.num_failed)
    if leases is not None:
        stats.leases_granted, stats.leases_fetched = leases.num_granted, leases.num_fetched
        stats.leases_expired = leases.num_expired
    return stats
