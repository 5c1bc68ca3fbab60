"""`write_quantized`: a copy of a checkpoint with its matrices in few bits, as Tonle, vLLM and `transformers` load it.

Does: the format of compressed-tensors (packed integers; or 8-bit floats, with activations to be quantized as they come), in
shards with an index, and the other files of the folder. The folder appears when it is complete. Does not: quantize embeddings,
the last matrix, routers, or parts that see or hear; calibrate on data.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tonle.config.model_json import read_json
from tonle.errors import ConfigError, ModelError
from tonle.models.layers import Quantized
from tonle.models.load.folder import open_folder, quantization_method
from tonle.models.load.places import places
from tonle.models.load.stored_tensors import StoredTensors, weight_files
from tonle.models.quantize import FewBits, group_of, is_quantizable, quantize
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.text_part import is_around_text, text_name
from tonle.models.weights import EMBEDDING, LM_HEAD, tensor_shapes

Tensors = dict[str, torch.Tensor]
Progress = Callable[[int, int], None]  # bytes read so far, and in all

_SHARD_BYTES = 2 * 2**30
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth", "*.gguf")


@dataclass(frozen=True, slots=True)
class Written:
    """Sizes of all tensors, in bytes, and how many matrices were quantized."""

    before: int
    after: int
    num_matrices: int


def write_quantized(source: ModelSource, out: Path, to: FewBits, group_size: int, progress: Progress) -> Written:
    """Raises `ModelError`, or `ConfigError` if `out` is there already."""
    config = _check(source, out)
    spec, _ = open_folder(source)  # checks every tensor
    stored = StoredTensors(source.path)
    text = _text_tensors(config, stored)
    chosen = _matrices(spec, stored, text)
    group = _common_group(stored, chosen, group_size)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        writer = _Writer(partial)
        for name, tensor in _tensors(stored, progress):
            writer.add(_packed(name, tensor, to, group) if name in chosen else {name: tensor})
        written = Written(_num_bytes(source.path), writer.close(), len(chosen))
        _copy_others(source.path, partial)
        settings = _settings(to, group, _left_out(stored, chosen, text))
        (partial / "config.json").write_text(json.dumps({**config, "quantization_config": settings}, indent=2) + "\n")
        partial.chmod(0o755)
        partial.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _unwritable(out: Path, error: OSError) -> ModelError:
    return ModelError(f"{out} cannot be written: {error.strerror or error}")


def _check(source: ModelSource, out: Path) -> dict[str, Any]:
    if source.kind == "gguf":
        raise ModelError(
            f"{source.path} is a GGUF file, which is usually quantized already; give the folder of the original checkpoint"
        )
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another folder, or remove it")
    config = read_json(source.path / "config.json")
    if quantization_method(source) is not None:
        raise ModelError(
            f"{source.path} is quantized already, and quantizing twice adds up errors; give the original checkpoint"
        )
    return config


def _text_tensors(config: dict[str, Any], stored: StoredTensors) -> dict[str, str]:
    """From a tensor's name in a plain checkpoint to its name in this one, which may have other parts than text."""
    if not is_around_text(config):
        return {name: name for name in stored.shapes}
    return {plain: name for name in stored.shapes if (plain := text_name(name)) is not None}


def _matrices(spec: ModelSpec, stored: StoredTensors, text: dict[str, str]) -> set[str]:
    """The checkpoint's names of the matrices to quantize."""
    where = places(spec, text)
    chosen = {text[where[name].stored] for name in tensor_shapes(spec) if is_quantizable(name) and name != LM_HEAD}
    for name in sorted(chosen):
        if len(stored.shapes[name]) != 2 or not name.endswith(".weight"):
            raise ModelError(
                f"{stored.folder}: {name} holds the matrices of all experts, for which the format has no form that others load; "
                f"serve the checkpoint with --quantization instead"
            )
    return chosen


def _common_group(stored: StoredTensors, chosen: set[str], group_size: int) -> int:
    """One for all, as the format has it; 0: a scale for each output."""
    inputs = math.gcd(*(stored.shapes[name][1] for name in chosen))
    return 0 if group_size == 0 or group_of(inputs, group_size) > group_size else group_of(inputs, group_size)


def _tensors(stored: StoredTensors, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    total = _num_bytes(stored.folder)
    done = 0
    for name in stored.shapes:
        tensor = stored.get(name)
        yield name, tensor
        done += tensor.nbytes
        progress(min(done, total), total)


def _packed(name: str, weight: torch.Tensor, to: FewBits, group: int) -> Tensors:
    """What a matrix is stored as. Computed on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = quantize(weight.to(device), to, group).to(torch.device("cpu"))
    scale = made.scale.to(weight.dtype).contiguous()
    module = name.removesuffix(".weight")
    if to == "fp8":
        return {name: made.numbers, f"{module}.weight_scale": scale}
    tensors = {f"{module}.weight_packed": pack_words(_unsigned(made), made.bits), f"{module}.weight_scale": scale,
               f"{module}.weight_shape": torch.tensor(made.shape)}  # fmt: skip
    if made.minimum is not None:
        zero = (made.minimum / -made.scale.float()).round().to(torch.uint8)  # (out, groups)
        tensors[f"{module}.weight_zero_point"] = pack_words(zero.t(), made.bits).t().contiguous()
    return tensors


def _unsigned(weight: Quantized) -> torch.Tensor:
    """Numbers from 0 on, as bytes."""
    return weight.numbers if weight.bits == 4 else weight.numbers.view(torch.uint8) ^ 128


def pack_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, n) uint8 -> (rows, n * bits / 32 rounded up) int32, the first number in the lowest bits of each word."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return padded.flatten().view(torch.int32).view(len(padded), -1)


def _settings(to: FewBits, group: int, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config`."""
    weights: dict[str, Any] = {
        "num_bits": 4 if to == "int4" else 8, "type": "float" if to == "fp8" else "int", "symmetric": to != "int4",
        "strategy": "group" if group and to != "fp8" else "channel", "dynamic": False,
    }  # fmt: skip
    if weights["strategy"] == "group":
        weights["group_size"] = group
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    form = "float-quantized" if to == "fp8" else "pack-quantized"
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations if to == "fp8" else None,
              "output_activations": None, "format": form}  # fmt: skip
    settings = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                "config_groups": {"group_0": scheme}, "ignore": ignored, "kv_cache_scheme": None}  # fmt: skip
    # transformers 5.23 takes packed zero points for tensors of a wrong shape, unless it unpacks weights as it loads them.
    return settings | {"dequantize": True} if to == "int4" else settings


def _left_out(stored: StoredTensors, chosen: set[str], text: dict[str, str]) -> list[str]:
    """Modules with a matrix that is not quantized. The last one is named also where it is the embedding."""
    matrices = {name: stored.shapes[of] for name, of in text.items() if of not in chosen}
    others = {text[name].removesuffix(".weight") for name, shape in matrices.items()
              if len(shape) == 2 and name.endswith(".weight") and name != EMBEDDING}  # fmt: skip
    return sorted({*others, LM_HEAD.removesuffix(".weight"), *_other_parts(stored.shapes.keys() - set(text.values()))})


def _other_parts(names: Collection[str]) -> set[str]:
    """Patterns for whole parts: the modules of a live model, and vLLM's, have other beginnings than the checkpoint's tensors."""
    return {rf"re:(.*\.)?{name.removeprefix('model.').partition('.')[0]}\..*" for name in names}


class _Writer:
    """Tensors into files of bounded size, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: Tensors = {}
        self._shards: list[list[str]] = []
        self._num_bytes = 0

    def add(self, tensors: Tensors) -> None:
        if self._waiting and _total(self._waiting) + _total(tensors) > _SHARD_BYTES:
            self._write()
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._folder / f"{len(self._shards)}.tmp", metadata={"format": "pt"})
        self._num_bytes += _total(self._waiting)
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def close(self) -> int:
        """Name the files, and write the index if there are several. How many bytes all tensors have."""
        self._write()
        count = len(self._shards)
        names = ["model.safetensors"] if count == 1 else [
            f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)
        ]  # fmt: skip
        for index, name in enumerate(names):
            (self._folder / f"{index}.tmp").rename(self._folder / name)
            (self._folder / name).chmod(0o644)
        if count > 1:
            homes = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            index_file = {"metadata": {"total_size": self._num_bytes}, "weight_map": homes}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n")
        return self._num_bytes


def _total(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _copy_others(folder: Path, into: Path) -> None:
    """Tokenizer, templates, licence: all files but those with weights."""
    for file in folder.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_FILES) and file.name != "config.json":
            shutil.copyfile(file, into / file.name)
