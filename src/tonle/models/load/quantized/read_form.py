"""`read_form`: from a checkpoint's `quantization_config` to the form its matrices are in.

Does: refuse by name what we cannot read, before any tensor is read. Does not: look at tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonle.errors import ModelError
from tonle.models.load.quantized.awq import AWQ
from tonle.models.load.quantized.bitsandbytes import BitsAndBytes
from tonle.models.load.quantized.compressed_tensors import CompressedTensors
from tonle.models.load.quantized.form import Form
from tonle.models.load.quantized.fp8 import FP8
from tonle.models.load.quantized.gptq import GPTQ
from tonle.models.load.quantized.mxfp4 import MXFP4

Settings = Mapping[str, Any]

_SUPPORTED = "AWQ (GEMM), GPTQ (4 and 8 bits), compressed-tensors (int4, int8, fp8), FP8, bitsandbytes, MXFP4"
_INSTEAD = "use another checkpoint of the model: the original (--quantization makes it smaller as it is loaded), or a GGUF file"
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


def read_form(config: Settings) -> Form | None:
    """Of a model's `config.json`; None if it is not quantized. Raises `ModelError`."""
    settings = quantization_settings(config)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError(f"quantization_config should be a JSON object, not {settings!r}")
    method = str(settings.get("quant_method", "unknown")).lower().replace("_", "-")
    match method:
        case "awq":
            return _awq(settings)
        case "gptq":
            return _gptq(settings)
        case "auto-round" | "intel/auto-round":
            packing = str(settings.get("packing_format", ""))
            return _awq({}) if "awq" in packing else _gptq({"checkpoint_format": packing.rpartition(":")[2]})
        case "compressed-tensors" | "sparseml":
            return _compressed(settings)
        case "fp8" | "fbgemm-fp8":
            return FP8(block=_block(settings.get("weight_block_size")))
        case "modelopt":
            return _modelopt(settings)
        case "bitsandbytes":
            return BitsAndBytes()
        case "mxfp4":
            return MXFP4()
    named = f"checkpoints quantized with {settings['quant_method']!r}" if "quant_method" in settings else None
    raise _refused(named or "quantized checkpoints that do not name their method (quant_method)")


def quantization_settings(config: Settings) -> Any:
    """As its config has them, in one of three places; None if it is not quantized."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or config.get("compression_config") or inner


def _refused(what: str) -> ModelError:
    return ModelError(f"{what} are not supported; supported: {_SUPPORTED}; {_INSTEAD}")


def _awq(settings: Settings) -> Form:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refused(f"AWQ checkpoints in the layout {version!r}")
    if settings.get("zero_point", True) is False:
        raise _refused("AWQ checkpoints without zero points")
    return AWQ()


def _modelopt(settings: Settings) -> Form | None:
    algorithm = settings.get("quant_algo")
    if algorithm is None and settings.get("kv_cache_quant_algo") is not None:  # keys and values alone
        return None
    if str(algorithm).upper() != "FP8":
        raise _refused(f"checkpoints quantized with 'modelopt' in the form {algorithm!r}")
    return FP8(block=None)


def _gptq(settings: Settings) -> Form:
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    offsets = {"gptq": 1, "auto_gptq": 1, "gptq_v2": 0}
    if layout not in offsets:
        raise _refused(f"GPTQ checkpoints in the layout {layout!r}")
    return GPTQ(zero_offset=offsets[layout])


def _compressed(settings: Settings) -> Form:
    groups = settings.get("config_groups") or {}
    schemes = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    formats = {str(form) for form in (settings.get("format"), *(each.get("format") for each in schemes)) if form}
    for form in sorted(formats):
        if form not in _COMPRESSED_FORMATS:
            raise _refused(f"compressed-tensors checkpoints in the format {form!r}")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _refused(f"compressed-tensors checkpoints with sparse matrices ({sparsity['format']})")
    transforms = settings.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise _refused("compressed-tensors checkpoints with transforms of activations")
    weights = [each["weights"] for each in schemes if isinstance(each.get("weights"), Mapping)]
    blocks = {_block(each.get("block_structure")) for each in weights}
    return CompressedTensors(block=blocks.pop() if len(blocks) == 1 else None)


def _block(value: Any) -> tuple[int, int] | None:
    """(out, in) that share a scale."""
    if isinstance(value, str):  # older files: 128x128
        value = [int(size) for size in value.split("x") if size.isdecimal()]
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(size, int) and size > 0 for size in value)
    ):
        return None
    return value[0], value[1]
