"""GGUF files as older and other programs lay them out say what transformers says: in parts, joined, expert by expert."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from tests.fakes.checkpoints import save_gguf
from tests.fakes.expert_checkpoints import save_experts_gguf
from tests.fakes.rewrite_gguf import Tensors, rewrite, split
from tests.parity.test_forward import check
from tests.parity.test_quantized import compiled, logits
from tonle.advise.read_model import find_model
from tonle.engine.kv.tiers.namespace import digest_of_model
from tonle.engine.text import load_text
from tonle.errors import ModelError
from tonle.models.load import load
from tonle.models.source import ModelSource, resolve

pytestmark = pytest.mark.usefixtures("one_thread")


def check_compiled(source: ModelSource) -> None:
    expected = logits(load(source))
    assert float((logits(compiled(source)) - expected).norm() / expected.norm()) < 1e-3


def test_a_model_in_parts(tmp_path: Path) -> None:
    whole = tmp_path / "tiny.Q8_0.gguf"
    model = save_gguf("llama", whole, quant=Quant.Q8_0)
    expected = find_model(str(whole))
    parts = split(whole, 3)
    source = resolve(tmp_path)
    assert (source.path, source.name) == (parts[0], "tiny.Q8_0")
    assert [resolve(part) for part in parts] == [source] * 3, "each part stands for the model"
    check(load(source), model, lengths=[1, 60], chunk=25)
    check_compiled(source)
    assert load_text(source).encode("the lazy dog")
    found = find_model(str(tmp_path))
    assert (found.tied, found.stored_as, found.layers) == (expected.tied, expected.stored_as, 2)
    before = digest_of_model(source)
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"\1")
    assert digest_of_model(source) != before


def test_parts_that_are_missing_or_others(tmp_path: Path) -> None:
    save_gguf("llama", tmp_path / "m.gguf")
    parts = split(tmp_path / "m.gguf", 3)
    content = [part.read_bytes() for part in parts]
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf: is missing; the model is in 3 files"):
        resolve(tmp_path)
    parts[1].write_bytes(content[2])
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf: is not part 2 of 3, as its name says"):
        load(resolve(tmp_path))
    other = tmp_path / "other.gguf"
    other.write_bytes(content[0])
    with pytest.raises(ModelError, match=r"other\.gguf: the first of 3 parts of a model, which should be named"):
        load(resolve(other))
    other.write_bytes(content[1])
    with pytest.raises(ModelError, match=r"other\.gguf: part 2 of 3 of a model; give the path of the first"):
        load(resolve(other))
    save_gguf("llama", tmp_path / "m.gguf")
    first = split(tmp_path / "m.gguf", 2, announced=99)[0]
    with pytest.raises(ModelError, match=r"m-00001-of-00002\.gguf: its 2 parts have 21 tensors, but should have 99"):
        load(resolve(first))


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda quant: quant.name)
def test_glm_with_joined_queries_keys_and_values(quant: Quant, tmp_path: Path) -> None:
    """As files from checkpoints of before there were GLM models in transformers."""

    def join(tensors: Tensors) -> Tensors:
        joined = dict(tensors)
        for name in tensors:
            if match := re.fullmatch(r"(blk\.\d+\.attn_)q(\.weight|\.bias)", name):
                parts = [joined.pop(f"{match[1]}{each}{match[2]}") for each in "qkv"]
                joined[f"{match[1]}qkv{match[2]}"] = (np.concatenate([data for data, _ in parts]), parts[0][1])
        assert len(joined) == len(tensors) - 2 * 2 * 2
        return joined

    model = save_gguf("glm", tmp_path / "apart.gguf", quant=quant)
    rewrite(tmp_path / "apart.gguf", tmp_path / "joined.gguf", join)
    check(load(resolve(tmp_path / "joined.gguf")), model, lengths=[1, 60], chunk=25)


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda quant: quant.name)
def test_experts_in_tensors_of_their_own(quant: Quant, tmp_path: Path) -> None:
    """As Mixtral's files of before April 2024."""

    def apart(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, (data, type_) in tensors.items():
            match = re.fullmatch(r"(blk\.\d+\.ffn_\w+)_exps\.weight", name)
            own = {f"{match[1]}.{index}.weight": (each, type_) for index, each in enumerate(data)} if match else {}
            changed |= own or {name: (data, type_)}
        assert len(changed) == len(tensors) + 2 * 3 * 5
        return changed

    model = save_experts_gguf("mixtral", tmp_path / "new.gguf", quant=quant, sliding_window=None)
    rewrite(tmp_path / "new.gguf", tmp_path / "old.gguf", apart)
    check(load(resolve(tmp_path / "old.gguf")), model, lengths=[1, 60], chunk=25)
    check_compiled(resolve(tmp_path / "old.gguf"))
