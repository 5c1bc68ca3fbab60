"""Where defaults of requests come from, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.fakes.checkpoints import tiny_model
from tonle.config.engine import EngineConfig
from tonle.engine.defaults import read_defaults, suited_to_cpu
from tonle.engine.request import GenerationConfig, GenerationDefaults, ResolvedConfig
from tonle.errors import ConfigError, InvalidRequest
from tonle.models.source import ModelSource

WRITTEN = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 300,
    "eos_token_id": [7, 8], "bos_token_id": 1, "do_sample": True, "transformers_version": "4.37.0",
}  # fmt: skip
READ = GenerationDefaults(
    temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05, max_new_tokens=300, max_chat_tokens=300
)


def folder(path: Path, content: Any = WRITTEN) -> ModelSource:
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "generation_config.json").write_text(text)
    return ModelSource("folder", path, "test")


def test_a_folder(tmp_path: Path) -> None:
    assert read_defaults(folder(tmp_path), EngineConfig()) == (READ, [7, 8])
    assert read_defaults(folder(tmp_path, {"eos_token_id": 5}), EngineConfig()) == (GenerationDefaults(), [5])
    assert read_defaults(ModelSource("folder", tmp_path / "none", "test"), EngineConfig()) == (GenerationDefaults(), [])


def test_none_keeps_the_ends_of_answers_only(tmp_path: Path) -> None:
    found = read_defaults(folder(tmp_path), EngineConfig(generation_config="none"))
    assert found == (GenerationDefaults(), [7, 8])


def test_another_folder_stands_in_for_the_models(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folder(other, {"temperature": 0.3})
    found, stops = read_defaults(folder(tmp_path), EngineConfig(generation_config=str(other)))
    assert found == GenerationDefaults(temperature=0.3) and stops == []


@pytest.mark.parametrize(("content", "said"), [
    ("{", "is not valid JSON"),
    ([1], "must hold a JSON object, not a list"),
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
    ({"top_p": 2}, "top_p must be between 0 and 1, 0 excluded, not 2"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
    ({"eos_token_id": "end"}, "eos_token_id must be a token id or a list of them, not 'end'"),
])  # fmt: skip
def test_a_bad_file(tmp_path: Path, content: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model's own is passed over with a warning, one that was asked for is an error."""
    good = {"top_k": 9, **content} if isinstance(content, dict) else content
    source = folder(tmp_path, good)
    with caplog.at_level("WARNING"):
        found, stops = read_defaults(source, EngineConfig())
    assert said in caplog.text and "generation_config.json" in caplog.text and "ignored" in caplog.text
    assert found == GenerationDefaults(top_k=9 if isinstance(content, dict) else None) and stops == []
    with pytest.raises(ConfigError) as caught:
        read_defaults(source, EngineConfig(generation_config=str(tmp_path)))
    assert said in caught.value.message


def test_a_folder_without_the_file() -> None:
    with pytest.raises(ConfigError, match=r"a folder with a generation_config\.json, not '/no/where': No such file"):
        read_defaults(ModelSource("folder", Path("/x"), "test"), EngineConfig(generation_config="/no/where"))


def test_an_override_wins_and_limits(tmp_path: Path) -> None:
    override = {"temperature": 0, "top_k": -1, "max_new_tokens": 50, "eos_token_id": 9}
    config = EngineConfig(override_generation_config=override)
    found, stops = read_defaults(folder(tmp_path), config)
    assert (found.temperature, found.top_k, found.top_p) == (0, 0, 0.8)
    assert (found.max_new_tokens, found.max_chat_tokens, found.max_tokens_limit) == (50, 50, 50)
    assert stops == [7, 8, 9]
    with pytest.raises(ConfigError, match="override_generation_config: temperature must be between 0 and 100, not -1"):
        read_defaults(folder(tmp_path), EngineConfig(override_generation_config={"temperature": -1}))


def test_an_override_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(override_generation_config={"temprature": 1, "top_p": 1}).validate()
    assert "unknown keys: temprature; known: temperature, top_p, top_k" in caught.value.message


def test_a_gguf_file_may_carry_sampling(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, stops = read_defaults(ModelSource("gguf", file, "tiny"), EngineConfig())
    assert found == GenerationDefaults(temperature=0.5, top_k=40, repetition_penalty=1.25) and stops == []


@pytest.mark.model
def test_the_default_model_has_some(default_model: ModelSource) -> None:
    found, _ = read_defaults(default_model, EngineConfig())
    assert found == GenerationDefaults(temperature=0.2, top_p=0.5)


def test_a_live_model() -> None:
    model = tiny_model("llama")
    model.generation_config.temperature = 0.25
    found, stops = read_defaults(model, EngineConfig())
    assert found == GenerationDefaults(temperature=0.25) and stops == [2]


@pytest.mark.parametrize(("of_model", "setting", "on_gpu", "on_cpu"), [
    (None, None, None, 1024), (300, None, 300, 300), (5000, None, 5000, 1024), (300, 4000, 4000, 4000),
])  # fmt: skip
def test_the_length_of_a_chat(
    tmp_path: Path, of_model: int | None, setting: int | None, on_gpu: int | None, on_cpu: int
) -> None:
    config = EngineConfig(default_max_tokens=setting)
    found, _ = read_defaults(folder(tmp_path, {"max_new_tokens": of_model}), config)
    assert found.max_chat_tokens == on_gpu and suited_to_cpu(found, config).max_chat_tokens == on_cpu


# -- applied


def test_what_a_request_sets_wins_and_the_rest_is_the_models() -> None:
    made = READ.apply(GenerationConfig(temperature=0, top_k=0), max_tokens=300, room=1000)
    assert made == ResolvedConfig(temperature=0, top_k=0, top_p=0.8, min_p=0.1, repetition_penalty=1.05, max_length=300)
    assert GenerationDefaults().apply(GenerationConfig(), max_tokens=None, room=99) == ResolvedConfig(max_length=99)


@pytest.mark.parametrize(("asked", "least", "room", "limit", "length"), [
    (None, 0, 1000, None, 16), (None, 0, 5, None, 5), (None, 0, -3, None, 1), (None, 40, 1000, None, 40),
    (200, 0, 1000, None, 200), (200, 0, 5, None, 200), (200, 0, 1000, 50, 50), (None, 0, 1000, 8, 8),
])  # fmt: skip
def test_lengths(asked: int | None, least: int, room: int, limit: int | None, length: int) -> None:
    config = GenerationConfig(max_length=asked, min_tokens=least)
    made = GenerationDefaults(max_tokens_limit=limit).apply(config, max_tokens=16, room=room)
    assert made.max_length == length


def test_max_tokens_is_another_name() -> None:
    assert (
        GenerationConfig(max_tokens=5) == GenerationConfig(max_length=5) == GenerationConfig(max_tokens=5, max_length=5)
    )
    with pytest.raises(InvalidRequest, match="give one of them, not 5 and 6"):
        GenerationConfig(max_tokens=5, max_length=6)
    later = GenerationConfig()
    later.max_tokens = 7
    later.validate()
    assert later.max_length == 7
    with pytest.raises(InvalidRequest, match="max_length must be at least 1, not 0"):
        GenerationConfig(max_tokens=0).validate()
