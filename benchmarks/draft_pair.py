"""Two models of one vocabulary, made from one file: the small one can guess for the large one.

The large one has every layer of the file, and after each one copies that add nothing to its result: their output matrices are
zero. So it takes several times as long and says what the file says. The small one is the file itself, or lacks some of its layers
and so says something else now and then.

Does: write both as GGUF files. Does not: run them (`speculation.py --draft-pair`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ADDS_TO_RESULT = ("attn_output.weight", "ffn_down.weight")


class Layer(NamedTuple):
    number: int  # in the file
    is_idle: bool  # adds nothing


class DraftPair(NamedTuple):
    large: Path
    small: Path


def write_draft_pair(source: Path, folder: Path, *, times: int, left_out: int) -> DraftPair:
    """`times`: layers of the large model for each one of the file. `left_out`: layers that the small model lacks."""
    import gguf

    reader = gguf.GGUFReader(source)
    layers = range(1 + max(int(found[1]) for tensor in reader.tensors if (found := _LAYER.match(tensor.name))))
    # Spread over the model, but for its first and last layer, without which it says nothing sensible.
    missing = {int(number) for number in np.linspace(1, len(layers) - 2, left_out + 2)[1:-1]}
    pair = DraftPair(folder / "large.gguf", folder / "small.gguf")
    _write(reader, pair.large, [Layer(number, copy > 0) for number in layers for copy in range(times)])
    _write(reader, pair.small, [Layer(number, False) for number in layers if number not in missing])
    return pair


def _write(reader: Any, path: Path, layers: list[Layer]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):  # the writer has them
            continue
        value = len(layers) if name.endswith(".block_count") else field.contents()
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for name, data, kind in _tensors(reader, layers):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(reader: Any, layers: list[Layer]) -> Iterator[tuple[str, Any, Any]]:
    for tensor in reader.tensors:
        found = _LAYER.match(tensor.name)
        if not found:
            yield tensor.name, tensor.data, tensor.tensor_type
            continue
        for number, layer in enumerate(layers):
            if layer.number == int(found[1]):
                is_zero = layer.is_idle and found[2] in _ADDS_TO_RESULT
                # Zero bytes are zeros in every type of GGUF, scales included.
                data = np.zeros_like(tensor.data) if is_zero else tensor.data
                yield f"blk.{number}.{found[2]}", data, tensor.tensor_type
