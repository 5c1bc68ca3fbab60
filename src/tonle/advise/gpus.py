"""`DataSheet`: what a GPU's maker says about it, for the GPUs that serve models; or a user's own numbers.

Does: memory, bandwidth, dense operations per second (without sparsity), links between GPUs. Does not: know prices: they differ by
provider and week, so a price is always the user's.
"""

from __future__ import annotations

import difflib

import msgspec

from tonle.advise.units import GB, GIB
from tonle.errors import ConfigError

_T = 1e12
_PCIE4, _PCIE5 = 32e9, 64e9  # bytes per second and direction of 16 lanes
_MOST_OF_A_SERVER = 8  # GPUs with fast links to each other


class DataSheet(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second, dense. None: the GPU has no such unit."""

    name: str
    memory_bytes: int  # that a program can use, as the driver reports it: rounded down to whole GiB
    bandwidth: float  # bytes per second
    bf16: float  # operations per second
    fp8: float | None = None
    int8: float | None = None
    link: float = _PCIE4  # bytes per second to the other GPUs of the server, in each direction
    link_name: str = "PCIe 4"
    most_gpus: int = _MOST_OF_A_SERVER  # of one replica
    deploy_name: str | None = None  # what `tonle deploy` calls it; None: not in its table
    maker: str = "NVIDIA"
    served: bool = True  # whether Tonle's engine has kernels for it
    origin: str = "data sheet"

    def rate(self, kind: str) -> float:
        """Of products whose operands are stored so: bf16's where the GPU has no unit for the kind."""
        found: float | None = getattr(self, kind)
        return found or self.bf16

    @property
    def has_fp8(self) -> bool:
        return self.fp8 is not None

    def ridge(self, kind: str, bytes_per_weight: float) -> float:
        """Rows at which reading a weight takes as long as multiplying with it: 2 operations per row and weight."""
        return self.rate(kind) * bytes_per_weight / (2 * self.bandwidth)


def _nvlink(each_way_gb: float, generation: int) -> dict[str, object]:
    return {"link": each_way_gb * GB, "link_name": f"NVLink {generation}"}


def _sheet(
    name: str, gib: int, bandwidth_gb: float, bf16: float, fp8: float | None, int8: float | None, **others: object
) -> DataSheet:
    values: dict[str, object] = {
        "name": name,
        "memory_bytes": gib * GIB,
        "bandwidth": bandwidth_gb * GB,
        "bf16": bf16 * _T,
        "fp8": None if fp8 is None else fp8 * _T,
        "int8": None if int8 is None else int8 * _T,
        **others,
    }
    return msgspec.convert(values, DataSheet)


# name, GiB that the driver reports, GB/s, dense T operations/s in bf16, fp8, int8
_TABLE = (
    _sheet("A10", 22, 600, 125, None, 250, deploy_name="A10G"),
    _sheet("A10G", 22, 600, 70, None, 140, deploy_name="A10G"),
    _sheet("L4", 22, 300, 121, 242, 242, deploy_name="L4"),
    _sheet("L40S", 44, 864, 362, 733, 733, deploy_name="L40S"),
    _sheet("RTX-4090", 23, 1008, 165, 330, 661, deploy_name="RTX-4090"),
    _sheet("A100-40GB", 39, 1555, 312, None, 624, deploy_name="A100-40GB", **_nvlink(300, 3)),
    _sheet("A100-80GB", 79, 2039, 312, None, 624, deploy_name="A100-80GB", **_nvlink(300, 3)),
    _sheet("H100", 79, 3350, 989, 1979, 1979, deploy_name="H100", **_nvlink(450, 4)),
    _sheet("H100-PCIe", 79, 2000, 756, 1513, 1513, deploy_name="H100", link=_PCIE5, link_name="PCIe 5"),
    _sheet("H200", 139, 4800, 989, 1979, 1979, deploy_name="H200", **_nvlink(450, 4)),
    _sheet("B200", 178, 8000, 2250, 4500, 4500, deploy_name="B200", **_nvlink(900, 5)),
    _sheet("MI300X", 191, 5300, 1307, 2615, 2615, link=448 * GB, link_name="Infinity Fabric", maker="AMD", served=False),
)  # fmt: skip
GPUS = {sheet.name: sheet for sheet in _TABLE}
_ALSO = {
    "A100": "A100-80GB", "A100-SXM": "A100-80GB", "A100-80": "A100-80GB", "A100-40": "A100-40GB",
    "H100-SXM": "H100", "H100-80GB": "H100", "4090": "RTX-4090", "RTX4090": "RTX-4090",
}  # fmt: skip


def find_data_sheet(name: str) -> DataSheet:
    """By its name in any case, with spaces or without. Raises `ConfigError`."""
    wanted = name.upper().removeprefix("NVIDIA").removeprefix("AMD").strip(" -_").replace(" ", "-").replace("_", "-")
    by_name = {known.upper(): known for known in GPUS} | {also.upper(): known for also, known in _ALSO.items()}
    if wanted in by_name:
        return GPUS[by_name[wanted]]
    near = difflib.get_close_matches(wanted, by_name, n=1)
    hint = f"did you mean {by_name[near[0]]}? " if near else ""
    raise ConfigError(
        f"--gpu {name!r} is not known; {hint}It must be one of {', '.join(GPUS)}, or give --memory, --bandwidth and "
        f"--flops of your own",
        param="gpu",
    )


def own_data_sheet(
    base: DataSheet | None,
    *,
    memory: int | None,
    bandwidth: float | None,
    flops: float | None,
    fp8_flops: float | None,
    link: float | None,
) -> DataSheet:
    """`base` with a user's numbers instead of some of its own, or a device of the user's numbers alone. Raises `ConfigError`."""
    given = {"memory_bytes": memory, "bandwidth": bandwidth, "bf16": flops, "fp8": fp8_flops, "link": link}
    changes: dict[str, float | None] = {name: value for name, value in given.items() if value is not None}
    if base is not None:
        if not changes:
            return base
        if flops is not None:  # the ratios of the base, unless they are given
            for kind in ("fp8", "int8"):
                own: float | None = getattr(base, kind)
                changes.setdefault(kind, None if own is None else own * flops / base.bf16)
        return msgspec.structs.replace(base, **changes, origin="data sheet, with your numbers")
    missing = [
        flag for flag, value in (("--memory", memory), ("--bandwidth", bandwidth), ("--flops", flops)) if value is None
    ]
    if missing:
        raise ConfigError(
            f"name a GPU (--gpu H200; known: {', '.join(GPUS)}), or give all of --memory, --bandwidth and --flops: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            param="gpu",
        )
    return msgspec.convert({"name": "your GPU", "origin": "your numbers", **changes}, DataSheet)
