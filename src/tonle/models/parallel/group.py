"""`Group`: the ranks that compute one model together, as one of them sees it.

Does: add up tensors of all ranks, put columns of all ranks side by side, within a time limit. Does not: start ranks, or touch
the process-wide group of `torch.distributed`: a program may have several engines, or a group of its own.

Every rank gets the same bits from a sum. Routers rely on it: each rank chooses experts for itself, and they must agree.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.functional import pad

distributed: Any = torch.distributed  # whose classes of groups are not declared for type checkers

_LOOPBACK = "127.0.0.1"


class Group:
    """One rank's end."""

    def __init__(self, rank: int, size: int, connections: Any) -> None:
        self.rank = rank
        self.size = size
        self._connections = connections  # a `torch.distributed.ProcessGroup`

    @classmethod
    def connect(cls, rank: int, size: int, store: Path, device: torch.device, timeout_s: float) -> Group:
        """Meet the other ranks, which call this with the same `store`: a file that does not exist yet. Raises `RuntimeError` if
        they do not come within `timeout_s`; later, if one of them is gone or does not take part in a sum for as long."""
        met = distributed.FileStore(str(store), size)
        timeout = timedelta(seconds=timeout_s)
        met.set_timeout(timeout)
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return cls(rank, size, distributed.ProcessGroupNCCL(met, rank, size, options))
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]  # a host's own name may lead anywhere
        return cls(rank, size, gloo(met, rank, size, options))

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks give, of equal shapes. `own` may be changed."""
        summed = own.contiguous()
        self._connections.allreduce([summed]).wait()
        return summed

    def side_by_side(self, own: torch.Tensor, columns: int) -> torch.Tensor:
        """own (rows, n) of each rank -> (rows, columns) on rank 0, in the order of ranks; the others get what they gave.

        n is columns / ranks, rounded up, but for the last ranks, which may have fewer.
        """
        if not own.shape[0]:
            return own.new_empty(0, columns)
        each = -(-columns // self.size)
        padded = pad(own, (0, each - own.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else []
        self._connections.gather([parts] if parts else [], [padded], _to_rank_0()).wait()
        return torch.cat(parts, dim=1)[:, :columns] if parts else own


def _to_rank_0() -> Any:
    options = distributed.GatherOptions()
    options.rootRank = 0
    return options
