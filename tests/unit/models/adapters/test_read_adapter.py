"""Reading PEFT folders: what the numbers become, which folders are the same adapter, and what every refusal says."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import PREFIX, write_adapter
from tests.fakes.checkpoints import save_folder
from tonle.errors import ModelError
from tonle.models.adapters import Adapter
from tonle.models.adapters.read_adapter import read_adapter
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve
from tonle.models.spec import ModelSpec

Tensors = dict[str, torch.Tensor]
Q = f"{PREFIX}layers.0.self_attn.q_proj"
AGAIN = "; save or copy the adapter again"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model")
    save_folder("llama", path)  # 2 layers; hidden 64, key-value 32, intermediate 160
    return read_spec(resolve(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapter"


def read(folder: Path, spec: ModelSpec) -> Adapter:
    return read_adapter(folder, spec, max_rank=16)


def equal(first: Adapter, second: Adapter) -> bool:
    return first.parts.keys() == second.parts.keys() and all(
        torch.equal(part.a, second.parts[place].a) and torch.equal(part.b, second.parts[place].b)
        for place, part in first.parts.items()
    )


def configure(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def change(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


def refused(folder: Path, spec: ModelSpec, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, spec)
    message = caught.value.message
    assert str(folder) in message and "\n" not in message
    assert all(word in message for word in words), message
    return message


@pytest.mark.parametrize("how", [
    {}, {"use_rslora": True}, {"alpha": 0.5}, {"rank": 1}, {"rank": 16, "alpha": 16}, {"modules": ["v", "down"]}, {"layers": [1]},
    {"rank": {"q": 2, "k": 3, "up": 16}, "modules": ["q", "k", "up"]},
    {"rank": {"q": 2, "k": 3}, "modules": ["q", "k"], "use_rslora": True},
    {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"dtype": torch.float8_e4m3fn},
    {"infix": ".default"}, {"infix": ".khmer-qa"}, {"prefix": "model."}, {"prefix": "base_model.model."}, {"prefix": ""},
    {"target_modules": "all-linear"}, {"target_modules": None},
    {"modules": ["q", "v"], "target_modules": r".*\.self_attn\.(q|v)_proj"},
    {"modules": ["q"], "layers": [0], "layers_to_transform": None, "target_modules": ["model.layers.0.self_attn.q_proj"]},
    {"modules": ["q"], "layers": [0], "layers_to_transform": 0},
    {"modules": ["q", "k"], "target_modules": "all-linear", "exclude_modules": ["v_proj", "o_proj", "mlp.gate_proj", "up_proj",
                                                                               "down_proj"]},
    {"lora_dropout": 0.5, "a_later_setting": {"of": "peft"}, "init_lora_weights": "gaussian", "base_model_name_or_path": None},
], ids=str)  # fmt: skip
def test_what_is_read_is_what_was_written(folder: Path, spec: ModelSpec, how: dict[str, Any]) -> None:
    written, adapter = write_adapter(folder, spec, **how), read(folder, spec)
    assert equal(adapter, written)
    assert adapter.digest == written.digest and adapter.rank == written.rank
    for part in adapter.parts.values():
        assert part.a.dtype == part.b.dtype == torch.float32
        assert part.a.is_contiguous() and part.b.is_contiguous()


def test_patterns_of_alpha_and_rank_are_those_of_peft(folder: Path, spec: ModelSpec) -> None:
    """The first key that matches the end of a module's path counts: plain names, paths and patterns."""
    write_adapter(folder, spec, rank=4, alpha=4, modules=["q", "k", "up"])
    plain = read(folder, spec)
    configure(
        folder,
        alpha_pattern={"1.self_attn.q_proj": 8, "q_proj": 12, r"layers\.[01]\.mlp\.up_proj": 20, "roj": 40, "^k": 9},
    )
    scaled = read(folder, spec)
    factors = {(0, "q"): 3, (1, "q"): 2, (0, "up"): 5, (1, "up"): 5, (0, "k"): 1, (1, "k"): 1}
    for place, factor in factors.items():
        torch.testing.assert_close(scaled.parts[place].b, plain.parts[place].b * factor)
        assert torch.equal(scaled.parts[place].a, plain.parts[place].a)
    configure(folder, rank_pattern={r"model\.layers\.1\..*k_proj": 3})
    refused(folder, spec, f"tensor {PREFIX}layers.1.self_attn.k_proj.lora_A.weight has shape (4, 64), wanted (3, 64)")


def test_the_digest_is_of_what_is_computed(tmp_path: Path, spec: ModelSpec) -> None:
    def digest(name: str, **how: Any) -> str:
        write_adapter(tmp_path / name, spec, **how)
        return read(tmp_path / name, spec).digest

    first = digest("first", dtype=torch.bfloat16)
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert digest("other-name", dtype=torch.bfloat16, base_model_name_or_path="x", lora_dropout=0) == first
    assert digest("prefix", dtype=torch.bfloat16, prefix="model.", infix=".default") == first
    change(tmp_path / "first", lambda tensors: tensors.update({name: t.float() for name, t in tensors.items()}))
    assert read(tmp_path / "first", spec).digest == first  # saved again, in another dtype
    change(tmp_path / "first", lambda tensors: tensors.update({n: t * 2 for n, t in tensors.items() if "lora_B" in n}))
    configure(tmp_path / "first", lora_alpha=4)
    assert read(tmp_path / "first", spec).digest == first  # half the scaling of twice the numbers
    others = [digest("alpha", dtype=torch.bfloat16, alpha=9), digest("seed", dtype=torch.bfloat16, seed=1),
              digest("layer", dtype=torch.bfloat16, layers=[0]),
              digest("module", dtype=torch.bfloat16, modules=["q"])]  # fmt: skip
    for side in ("A", "B"):
        write_adapter(tmp_path / side, spec, dtype=torch.bfloat16)

        def nudge(tensors: Tensors, side: str = side) -> None:
            tensors[f"{Q}.lora_{side}.weight"].view(torch.int16)[-1, -1] ^= 1  # the smallest change there is

        change(tmp_path / side, nudge)
        others.append(read(tmp_path / side, spec).digest)
    assert len({first, *others}) == 7


def test_equal_matrices_at_other_places_are_another_adapter(tmp_path: Path, spec: ModelSpec) -> None:
    write_adapter(tmp_path / "a", spec, modules=["q"], layers=[0])
    write_adapter(tmp_path / "b", spec, modules=["q"], layers=[1])
    assert read(tmp_path / "a", spec).digest != read(tmp_path / "b", spec).digest


@pytest.mark.parametrize(("settings", "words"), [
    ({"use_dora": True}, ["use_dora is True", "DoRA adapters are not supported", "merge_and_unload"]),
    ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
    ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices is [1, 2]"]),
    ({"bias": "lora_only"}, ["bias is lora_only"]), ({"lora_bias": True}, ["lora_bias"]),
    ({"fan_in_fan_out": True}, ["fan_in_fan_out", "(in, out)"]),
    ({"peft_type": "IA3"}, ["peft_type is IA3; only LORA", "merge_and_unload"]), ({"peft_type": None}, ["peft_type is None"]),
    ({"init_lora_weights": "pissa_niter_16"}, ["init_lora_weights is pissa_niter_16", "path_initial_model"]),
    ({"layer_replication": [[0, 2]]}, ["layer_replication"]), ({"alora_invocation_tokens": [3]}, ["aLoRA"]),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters"]),
    ({"r": 0}, ["r should be a whole number from 1 to 256, not 0"]), ({"r": True}, ["not True"]),
    ({"r": 257}, ["r is 257: ranks above 256 are not supported", "merge_and_unload"]),
    ({"r": "4"}, ["whole number"]), ({"lora_alpha": None}, ["lora_alpha should be a finite number, not None"]),
    ({"lora_alpha": float("inf")}, ["not inf"]), ({"lora_alpha": 10**400}, ["lora_alpha should be a finite number"]),
    ({"rank_pattern": {"q_proj": -1}}, ["rank_pattern of q_proj should be", "not -1"]), ({"rank_pattern": [4]}, ["rank_pattern"]),
    ({"rank_pattern": {"q_proj": 300}}, ["rank_pattern of q_proj is 300: ranks above 256 are not supported"]),
    ({"alpha_pattern": {"(": 1}}, ["( is not a valid pattern"]),
    ({"alpha_pattern": {"q_proj": "8"}}, ["alpha_pattern of q_proj"]),
    ({"target_modules": "(("}, ["(( is not a valid pattern"]), ({"target_modules": 5}, ["target_modules should be"]),
    ({"target_modules": [5]}, ["target_modules should be"]), ({"layers_to_transform": ["x"]}, ["layers_to_transform"]),
    ({"target_modules": ["q_proj"]}, ["layers.0.self_attn.k_proj.lora_A.weight is for a module", "does not target"]),
    ({"exclude_modules": r".*\.down_proj"}, ["layers.0.mlp.down_proj.lora_A.weight is for a module"]),
    ({"layers_to_transform": [1]}, ["layers.0.self_attn.q_proj.lora_A.weight is for a module"]),
    ({"rank_pattern": {f"x{n}": 1 for n in range(2001)}}, ["rank_pattern may hold 2000 patterns"]),
    ({"target_modules": "x" * 10_001}, ["target_modules may hold"]),
    ({"peft_type": "X\n" + "y" * 5000}, ["peft_type is 'X\\ny"]),
], ids=str)  # fmt: skip
def test_settings_that_are_refused(folder: Path, spec: ModelSpec, settings: dict[str, Any], words: list[str]) -> None:
    write_adapter(folder, spec)
    configure(folder, **settings)
    message = refused(folder, spec, *words)
    assert "adapter_" in message and len(message) < 700


def add(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(("edit", "words"), [
    (add(f"{Q}.lora_magnitude_vector.weight", 64), [f"tensor {Q}.lora_magnitude_vector.weight", "DoRA"]),
    (add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 320), ["lora_embedding_A", "embeddings are not supported"]),
    (add("base_model.model.lm_head.lora_A.weight", 4, 64), ["tensor base_model.model.lm_head.lora_A.weight", "lm_head are not"]),
    (add("base_model.model.lm_head.weight", 320, 64), ["lm_head"]),
    (add("base_model.model.score.modules_to_save.weight", 2, 64), ["whole modules"]),
    (add("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64), ["embeddings"]),
    (add(f"{Q}.lora_B.bias", 64), ["biases are not supported"]), (add(f"{Q}.base_layer.bias", 64), ["biases"]),
    (add(f"{PREFIX}layers.0.input_layernorm.lora_A.weight", 4, 64), ["may change q_proj, k_proj, v_proj, o_proj, gate_proj, up"]),
    (add(f"{PREFIX}layers.0.mlp.experts.3.up_proj.lora_A.weight", 4, 64), ["changes no matrix"]),
    (add("transformer.h.0.attn.c_attn.lora_A.weight", 4, 64), ["transformer.h.0.attn.c_attn.lora_A.weight changes no matrix"]),
    (add(f"{PREFIX}layers.2.self_attn.q_proj.lora_A.weight", 4, 64), ["for layer 2, but the model's last one is 1",
                                                                         "made for another model, of at least 3 layers: tiny"]),
    (lambda tensors: [add(f"{PREFIX}layers.{n}.mlp.up_proj.lora_A.weight", 4, 64)(tensors) for n in range(12)],
     ["layers.11.mlp.up_proj.lora_A.weight is for layer 11", "of at least 12 layers"]),
    (add("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 64), ["for the same matrix as model.layers.0.self_attn.q_proj."]),
    (add(f"{Q}.lora_A.other.weight", 4, 64), ["for the same matrix as"]),
    (lambda tensors: tensors.pop(f"{Q}.lora_B.weight"), [f"tensor {Q}.lora_A.weight has no lora_B", AGAIN]),
    (lambda tensors: tensors.pop(f"{Q}.lora_A.weight"), [f"tensor {Q}.lora_B.weight has no lora_A", AGAIN]),
    (add(f"{Q}.lora_A.weight", 4, 63), [f"tensor {Q}.lora_A.weight has shape (4, 63), wanted (4, 64)", "made for tiny"]),
    (add(f"{Q}.lora_B.weight", 4, 64), [f"{Q}.lora_B.weight has shape (4, 64), wanted (64, 4)"]),
    (add(f"{Q}.lora_A.weight", 8, 64), ["(8, 64), wanted (4, 64): the rank is 4 by adapter_config.json"]),
    (add(f"{Q}.lora_A.weight", 64), ["has shape (64,)"]), (add(f"{Q}.lora_A.weight"), ["has shape ()"]),
    (add(f"{Q}.lora_A.weight", 0, 64), ["has shape (0, 64)"]),
    (lambda tensors: tensors[f"{Q}.lora_A.weight"].fill_(float("nan")), [f"{Q}.lora_A.weight holds numbers that are", AGAIN]),
    (lambda tensors: tensors[f"{Q}.lora_B.weight"][3].fill_(float("inf")), [f"{Q}.lora_B.weight holds numbers that are NaN or"]),
    (lambda tensors: tensors[f"{Q}.lora_B.weight"].fill_(3e38), ["leave the range of float32"]),
    (lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}), ["has type I8, not one of: F"]),
    (lambda tensors: tensors.clear(), ["holds no tensors", AGAIN]),
    (add("x\ny" + "z" * 9000, 1), [r"tensor 'x\nyzzz"]),
])  # fmt: skip
def test_tensors_that_are_refused(
    folder: Path, spec: ModelSpec, edit: Callable[[Tensors], Any], words: list[str]
) -> None:
    write_adapter(folder, spec)
    change(folder, edit)
    message = refused(folder, spec, "adapter_model.safetensors", *words)
    assert len(message) < 900


def test_a_rank_beyond_the_setting_says_what_to_set(folder: Path, spec: ModelSpec) -> None:
    write_adapter(folder, spec, rank={"q": 20, "v": 32, "up": 16}, modules=["q", "v", "up"])
    refused(
        folder, spec, "layers.0.self_attn.v_proj.lora_A.weight has rank 32", "up to 16", "--max-lora-rank 32", "256"
    )
    assert read_adapter(folder, spec, max_rank=32).rank == 32
    write_adapter(folder, spec, rank=256)
    assert read_adapter(folder, spec, max_rank=256).rank == 256


def test_modules_without_tensors_stay_as_they_are(
    folder: Path, spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(folder, spec, modules=["q"], target_modules=["q_proj", "v_proj", "query_key_value"])
    with caplog.at_level(logging.INFO, "tonle.models"):
        assert read(folder, spec).parts.keys() == {(0, "q"), (1, "q")}
    assert "no tensors for 2 of the modules" in caplog.text and "model.layers.0.self_attn.v_proj" in caplog.text
    assert f"the adapter at {folder} was made for tiny" in caplog.text


@pytest.mark.parametrize("edit", [
    lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(4, 63)}),
    lambda tensors: tensors[f"{Q}.lora_A.weight"].fill_(float("nan")),
])  # fmt: skip
def test_an_adapter_that_is_refused_has_no_other_message(
    folder: Path, spec: ModelSpec, edit: Callable[[Tensors], Any], caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(folder, spec, modules=["q"], target_modules=["q_proj", "v_proj"])
    change(folder, edit)
    with caplog.at_level(logging.INFO, "tonle.models"):
        refused(folder, spec, f"tensor {Q}.lora_A.weight")
    assert not caplog.records


def test_damaged_files(folder: Path, spec: ModelSpec) -> None:
    write_adapter(folder, spec)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content, settings = file.read_bytes(), config.read_bytes()
    file.write_bytes(content[:-1000])
    refused(folder, spec, "adapter_model.safetensors: truncated: tensor base_model.model", "but the file has", AGAIN)
    for broken in (content[:100], b""):
        file.write_bytes(broken)
        refused(folder, spec, "truncated or not a safetensors file", AGAIN)
    file.write_bytes(content[:8] + b"x" + content[9:])
    refused(folder, spec, "not a valid safetensors file", AGAIN)
    header = 17 * 2**20
    file.write_bytes(header.to_bytes(8, "little") + b" " * (header + 8))
    refused(folder, spec, "its header has 17825792 bytes")
    file.write_bytes(content)
    for broken in (b"", b"[]", b"{", b"[" * 5000, b'{"r": ' + b"9" * 5000 + b"}"):
        config.write_bytes(broken)
        refused(folder, spec, "adapter_config.json: ")
    config.write_bytes(settings + b" " * 5_000_000)
    refused(folder, spec, "adapter_config.json: has 5000")


def test_a_file_that_changes_while_it_is_read(folder: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its check and its reading, a training program writes it anew."""
    write_adapter(folder, spec)
    whole, read_bytes = (folder / "adapter_model.safetensors").read_bytes(), Path.read_bytes
    for now in (whole[:-4], b"", whole.replace(b'"shape":[4,64]', b'"shape":[64,4]', 1)):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, now=now: now if path.suffix == ".safetensors" else read_bytes(path)
        )
        refused(folder, spec, "changed while it was read")


def test_a_path_or_file_that_the_system_will_not_open(folder: Path, spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"^/x{199}…: cannot be read: File name too long$"):
        read_adapter(Path("/" + "x" * 5000), spec, max_rank=16)
    write_adapter(folder, spec)
    header = b'{"x": {"dtype": "F32", "shape": [4194304, 4194304], "data_offsets": [0, 70368744177664]}}'
    with (folder / "adapter_model.safetensors").open("wb") as file:  # 64 TiB, none of it on the disk
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + 2**46)
        except OSError:
            pytest.skip("this file system has no files of that size")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: "):
        read_adapter(folder, spec, max_rank=16)


def test_folders_that_are_none(tmp_path: Path, spec: ModelSpec, folder: Path) -> None:
    for name in ("https://example.com/adapter", "org/khmer-qa", str(tmp_path / "missing"), "~no-such-user/x"):
        with pytest.raises(
            ModelError, match=r"there is no such folder; .*adapter_config\.json.*not fetched from URLs or hubs"
        ):
            read(Path(name), spec)
    folder.mkdir()
    refused(folder, spec, "is not an adapter: it has no adapter_config.json")
    save_folder("llama", folder)
    refused(folder, spec, "is a model, not an adapter")
    write_adapter(folder, spec)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, spec, "adapter_model.bin: pickled weights are not read", "safe_serialization=True")
    (folder / "adapter_model.bin").unlink()
    refused(folder, spec, "has no adapter_model.safetensors")
    os.mkfifo(folder / "adapter_model.safetensors")  # opening it would wait for a writer
    refused(folder, spec, "has no adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"is not a folder; an adapter is a local folder"):
        read(folder / "adapter_config.json", spec)


def test_links_are_followed_and_paths_in_files_are_not(folder: Path, tmp_path: Path, spec: ModelSpec) -> None:
    """The hub's cache is made of links. What the config names as its base is text."""
    written = write_adapter(tmp_path / "blobs", spec, base_model_name_or_path="../../etc/passwd", revision="/dev/zero")
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).symlink_to(tmp_path / "blobs" / name)
    assert read(folder, spec).digest == written.digest
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")
    refused(folder, spec, "has no adapter_model.safetensors")


@pytest.mark.parametrize("setting", ["target_modules", "rank_pattern"])
def test_a_pattern_made_to_be_slow_is_stopped(
    folder: Path, spec: ModelSpec, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.models.adapters.adapter_config._MATCHING_SECONDS", 0.05)
    pattern = r"(?:.{1,50000}){1,50000}[0-9]"
    write_adapter(folder, spec, **{setting: pattern if setting == "target_modules" else {pattern: 4}})
    refused(folder, spec, pattern, "takes too long")
