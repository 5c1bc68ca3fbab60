"""The GPUs that documents can ask for: one table.

Does: memory, and what platforms call the card. Does not: know prices or what is in stock.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tonle.deploy.units import GIB
from tonle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: int  # as the driver reports it, rounded down
    node_labels: tuple[str, ...]  # nvidia.com/gpu.product, as NVIDIA's feature discovery labels nodes: any of these
    runpod_id: str | None = None  # RunPod's gpuTypeId; None: not offered there
    kernels: bool = True  # our engine's kernels run on it: compute capability 8.0 or newer

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * GIB


_TABLE = (
    Gpu("T4", 15, ("Tesla-T4", "NVIDIA-T4"), kernels=False),
    Gpu("L4", 22, ("NVIDIA-L4",), "NVIDIA L4"),
    Gpu("A10G", 22, ("NVIDIA-A10G", "NVIDIA-A10")),
    Gpu("A40", 44, ("NVIDIA-A40",), "NVIDIA A40"),
    Gpu("RTX-4090", 23, ("NVIDIA-GeForce-RTX-4090",), "NVIDIA GeForce RTX 4090"),
    Gpu("L40S", 44, ("NVIDIA-L40S",), "NVIDIA L40S"),
    Gpu("A100-40GB", 39, ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB")),
    Gpu("A100-80GB", 79, ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"), "NVIDIA A100-SXM4-80GB"),
    Gpu("H100", 79, ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"), "NVIDIA H100 80GB HBM3"),
    Gpu("H200", 139, ("NVIDIA-H200", "NVIDIA-H200-NVL"), "NVIDIA H200"),
    Gpu("B200", 178, ("NVIDIA-B200",), "NVIDIA B200"),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}
_ALSO = {"A100": "A100-80GB", "A10": "A10G", "H100-80GB": "H100", "4090": "RTX-4090"}


def find_gpu(name: str) -> Gpu:
    """By its name in any case, with spaces or without. Raises `ConfigError`."""
    wanted = name.upper().removeprefix("NVIDIA").strip(" -_").replace(" ", "-").replace("_", "-")
    wanted = _ALSO.get(wanted, wanted)
    if wanted in GPUS:
        return GPUS[wanted]
    near = difflib.get_close_matches(wanted, GPUS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"gpu: {name!r} is not known; {hint}It must be one of {', '.join(GPUS)}", param="gpu")
