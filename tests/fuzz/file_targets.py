"""Model files from anywhere: broken headers of GGUF and safetensors files, broken configs and broken adapters are refused with
`ModelError`, cheaply."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import strategies as st

from tests.fakes.adapters import write_adapter
from tests.fuzz.bodies import ANYTHING, written
from tests.fuzz.target import FunctionTarget
from tonle.errors import ModelError
from tonle.models.adapters.read_adapter import read_adapter
from tonle.models.gguf_file import GGUFFile
from tonle.models.load.folder import open_folder
from tonle.models.read_spec import from_gguf, from_hf_config
from tonle.models.source import ModelSource

MAX_BYTES = 32 * 1024**2  # of memory, for files of a few kB
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "rms_norm_eps": 1e-5,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


@functools.cache
def _gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(8)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_token_list(["a", "b", "</s>"])
        writer.add_array("x.numbers", [1, 2, 3])
        writer.add_array("x.nested", [[1, 2], [3]])
        writer.add_eos_token_id(2)
        writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
        writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
    }
    return _with_length(json.dumps(header).encode()) + bytes(12)


def _with_length(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@st.composite
def _changed(draw: st.DrawFn, make: Callable[[], bytes]) -> bytes:
    """Some bytes or lengths of a real file overwritten, bytes put in, or its end cut off."""
    content = bytearray(make())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        new = draw(st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from([0, 1, 9, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]).map(lambda n: struct.pack("<Q", n)),
            st.integers(0, 40).map(lambda n: struct.pack("<I", n)),
        ))  # fmt: skip
        how = draw(st.integers(0, 5))
        if how == 0:
            del content[place:]
        elif how == 1:
            content[place:place] = new
        else:
            content[place : place + len(new)] = new
    return bytes(content)


@st.composite
def _nested_arrays(draw: st.DrawFn) -> bytes:
    depth, count = draw(st.integers(1, 3000)), draw(st.sampled_from([1, 1, 2, 2**20]))
    key = struct.pack("<Q", 1) + b"k"
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, count) * depth


_HEADERS = st.one_of(
    _changed(_safetensors),
    ANYTHING.map(lambda value: _with_length(written(value)) + bytes(12)),
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), st.one_of(ANYTHING, st.fixed_dictionaries(
        {"dtype": st.just("F32") | ANYTHING, "shape": ANYTHING, "data_offsets": st.lists(ANYTHING, max_size=3) | ANYTHING}
    ))).map(lambda header: _with_length(written(header)) + bytes(12)),
    st.binary(max_size=64),
)  # fmt: skip


def _bounded(read: Callable[[], object]) -> str:
    tracemalloc.start()
    try:
        read()
        return "read"
    except ModelError as error:
        assert error.message
        return "refused"
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_BYTES, f"{peak} bytes of memory"


def check_gguf(content: bytes, folder: Path) -> str:
    path = folder / "file.gguf"
    path.unlink(missing_ok=True)  # an old map of it may still be read
    path.write_bytes(content)
    return _bounded(lambda: from_gguf(GGUFFile(path)))


def check_safetensors(content: bytes, folder: Path) -> str:
    return _check_folder(folder, {"model.safetensors": content, "config.json": json.dumps(_CONFIG).encode()})


def check_config(case: tuple[str, bytes], folder: Path) -> str:
    files = {"model.safetensors": _safetensors(), "config.json": json.dumps(_CONFIG).encode()}
    return _check_folder(folder, files | {case[0]: case[1]})


def _check_folder(folder: Path, files: dict[str, bytes]) -> str:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name, content in files.items():
            (Path(place) / name).write_bytes(content)
        return _bounded(lambda: open_folder(ModelSource("folder", Path(place), "m")))


def _configs() -> st.SearchStrategy[Any]:
    changed = st.dictionaries(st.sampled_from([*_CONFIG, "quantization_config", "rope_scaling", "head_dim"]), ANYTHING,
                              min_size=1, max_size=2).map(lambda fields: {**_CONFIG, **fields})  # fmt: skip
    index = st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2) | ANYTHING})
    return st.one_of(
        st.tuples(st.just("config.json"), (changed | ANYTHING).map(written)),
        st.tuples(st.just("model.safetensors.index.json"), (index | ANYTHING).map(written)),
        st.tuples(st.just("generation_config.json"), ANYTHING.map(written)),
    )


@functools.cache
def _adapter() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), from_hf_config(_CONFIG), rank=2)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _adapters() -> st.SearchStrategy[Any]:
    """One of the two files changed."""
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    settings = [
        *json.loads(_adapter()[config]),
        "exclude_modules",
        "init_lora_weights",
        "trainable_token_indices",
        "lora_bias",
    ]
    values = st.one_of(
        ANYTHING, st.sampled_from([r".*_proj", "(", "(?:.{1,9999}){1,9999}[0-9]", ["q_proj"], {"q_proj": 2}])
    )
    changed = st.dictionaries(st.sampled_from(settings), values, min_size=1, max_size=2)
    return st.one_of(
        st.tuples(st.just(weights), _changed(lambda: _adapter()[weights])),
        st.tuples(st.just(weights), ANYTHING.map(lambda value: _with_length(written(value)) + bytes(12))),
        st.tuples(st.just(config), _changed(lambda: _adapter()[config])),
        st.tuples(st.just(config), changed.map(lambda new: written({**json.loads(_adapter()[config]), **new}))),
        st.tuples(st.just(config), ANYTHING.map(written)),
    )


def check_adapter(case: tuple[str, bytes], folder: Path) -> str:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name, content in {**_adapter(), case[0]: case[1]}.items():
            (Path(place) / name).write_bytes(content)
        return _bounded(lambda: read_adapter(Path(place), from_hf_config(_CONFIG), max_rank=16))


FILE_TARGETS = [
    FunctionTarget("gguf headers", 14, st.one_of(_changed(_gguf), _changed(_gguf), _nested_arrays()), check_gguf),
    FunctionTarget("safetensors headers", 6, _HEADERS, check_safetensors),
    FunctionTarget("model configs", 6, _configs(), check_config),
    FunctionTarget("adapters", 10, st.deferred(_adapters), check_adapter),
]
