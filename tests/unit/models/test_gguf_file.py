"""Reading GGUF: every kind of value, and every way a file can be broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.fakes.checkpoints import save_gguf
from tonle.errors import ModelError
from tonle.models.gguf_file import GGMLType, GGUFFile


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def entry(name: str, *dims: int, type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(content: bytes) -> Path:
        path = tmp_path / "file.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    save_gguf("llama", path, quant=gguf.GGMLQuantizationType.Q4_1)
    return path.read_bytes()


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    scalars: dict[str, Any] = {
        "uint8": 200, "int8": -5, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000, "int32": -2_000_000_000,
        "uint64": 2**63, "int64": -(2**62), "float32": 0.5, "float64": 0.1, "bool": True, "string": "ភាសា",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_array("x.strings", ["a", "", "ខ្មែរ"])
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.add_array("x.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert {kind: metadata[f"x.{kind}"] for kind in scalars} == scalars
    assert metadata["x.numbers"].tolist() == [1, 2, 3]
    assert metadata["x.strings"] == ["a", "", "ខ្មែរ"]
    assert [part.tolist() for part in metadata["x.nested"]] == [[1, 2], [3]]
    assert metadata["x.flags"].tolist() == [True, False]


def test_agrees_with_the_reference_reader(written: Any, model_bytes: bytes) -> None:
    path = written(model_bytes)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert own.type.name == tensor.tensor_type.name
        np.testing.assert_array_equal(own.data, np.asarray(tensor.data).reshape(-1).view(np.uint8))
    tokens = theirs.fields["tokenizer.ggml.tokens"]
    assert ours.metadata["tokenizer.ggml.tokens"] == [bytes(tokens.parts[i]).decode() for i in tokens.data]


def test_block_sizes_are_those_of_the_reference() -> None:
    for type_ in GGMLType:
        theirs = gguf.GGMLQuantizationType(int(type_))
        assert type_.name == theirs.name
        assert (type_.block_numbers, type_.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_version_2_and_alignment(written: Any) -> None:
    alignment = string("general.alignment") + struct.pack("<II", 4, 64)
    start = header(2, tensors=1, entries=1) + alignment + entry("t", 2, 3)
    padding = bytes(-len(start) % 64)
    file = GGUFFile(written(start + padding + np.arange(6, dtype="<f4").tobytes()))
    assert file.tensors["t"].shape == (3, 2)
    np.testing.assert_array_equal(file.tensors["t"].data.view("<f4"), np.arange(6))


@pytest.mark.parametrize(("content", "complaint"), [
    (b"", "empty"),
    (b"PK\x03\x04 a zip file", "not a GGUF file"),
    (b"GG", "not a GGUF file"),
    (header(1), "version 1 is not supported; supported: 2, 3"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    (header()[:-3], "truncated: the file ends inside the metadata count"),
    (header(entries=1), "truncated: the file ends inside a metadata key"),
    (header(entries=1) + struct.pack("<Q", 2**60), "truncated: a metadata key should have"),
    (header(entries=1) + struct.pack("<Q", 1) + b"\xff", "a metadata key is not UTF-8"),
    (header(entries=1) + string("k") + struct.pack("<I", 77), "metadata 'k' has the unknown value type 77"),
    (header(entries=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**40), "'k' should hold 1099511627776 elements"),
    (header(entries=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**40), "truncated: metadata 'k'"),
    (header(entries=1) + string("k") + struct.pack("<IIQ", 9, 50, 1), "array of the unknown value type 50"),
    (header(entries=1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, "arrays inside each other"),
    (header(entries=1) + string("general.alignment") + struct.pack("<II", 4, 3), "power of two"),
    (header(entries=1) + string("split.count") + struct.pack("<I", 8) + string("x"), "split.count should be a whole number"),
    (header(tensors=1) + string("t"), "truncated: the file ends inside the entry of tensor t"),
    (header(tensors=1) + entry("t", 1, 1, 1, 1, 1), "tensor t has 5 dimensions"),
    (header(tensors=1) + entry("t", 1, type_id=99), "tensor t has the unknown type 99"),
    (header(tensors=1) + entry("t", 33, type_id=8), "rows of tensor t have 33 numbers"),
    (header(tensors=1) + entry("t", 1, offset=7), "starts at 7, not a multiple of 32"),
    (header(tensors=2) + entry("t", 0) + entry("t", 0), "tensor t is listed twice"),
    (header(tensors=1) + entry("t", 2**40), r"truncated: tensor t ends at byte \d+ but the file has \d+"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_broken_files_are_named(written: Any, content: bytes, complaint: str) -> None:
    path = written(content)
    with pytest.raises(ModelError, match=complaint) as caught:
        GGUFFile(path)
    assert str(path) in caught.value.message


def test_a_cut_anywhere_is_noticed(written: Any, model_bytes: bytes) -> None:
    for size in range(0, len(model_bytes) - 32, 1237):
        with pytest.raises(ModelError):
            GGUFFile(written(model_bytes[:size]))


def test_the_cut_tensor_is_named(written: Any, model_bytes: bytes) -> None:
    last = list(GGUFFile(written(model_bytes)).tensors)[-1]
    with pytest.raises(ModelError, match=rf"truncated: tensor {last} ends at byte \d+ but the file has \d+"):
        GGUFFile(written(model_bytes[:-64]))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        GGUFFile(tmp_path / "nowhere.gguf")
