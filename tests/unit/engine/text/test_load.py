"""`load_text` and `Text.from_live`: what is read from where."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.unit.engine.text.corpus import SENTENCES
from tests.unit.engine.text.tokenizers_for_tests import EOS, PlainTokenizer, byte_level_tokenizer
from tonle.engine.text import Text, load_text
from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.models.source import ModelSource

CHAT = [{"role": "user", "content": "hi"}]
BOS = 257


def folder(path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> ModelSource:
    if tokenizer is None:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens([AddedToken("<begin>", special=True, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return ModelSource("folder", path, "test")


def test_a_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<begin>"},
        "eos_token": "<end>",
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    text = load_text(folder(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [7, 8]}))
    assert text.vocab_size == 258
    assert text.bos_id == BOS
    assert text.eos_ids == {7, 8, EOS}
    assert text.encode("hi") == [BOS, *b"hi"]
    assert text.encode("hi", add_special_tokens=False) == [*b"hi"]
    assert text.render_chat(CHAT) == "<begin>hi<end>"
    assert text.encode_chat(CHAT) == [BOS, *b"hi", EOS]  # one BOS, the template's


def test_the_config_has_the_last_word_on_bos(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<begin>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", pair="<begin> $A $B", special_tokens=[("<begin>", BOS)]
    )
    silent = load_text(folder(tmp_path, tokenizer, tokenizer_config={"bos_token": "<begin>"}))
    assert silent.encode("a") == [BOS, *b"a"]
    against = load_text(folder(tmp_path, tokenizer, tokenizer_config={"bos_token": "<begin>", "add_bos_token": False}))
    assert against.encode("a") == [*b"a"]


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    source = folder(tmp_path, tokenizer_config={"chat_template": named})
    assert load_text(source).render_chat(CHAT) == "named"
    assert load_text(source).render_chat(CHAT, tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    text = load_text(source)
    assert text.render_chat(CHAT) == "file"
    assert text.chat_template == "file"


def test_the_template_beside_a_processor(tmp_path: Path) -> None:
    """Checkpoints with images have it in a file of its own."""
    source = folder(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert load_text(source).render_chat(CHAT) == "of the processor"


def test_no_template(tmp_path: Path) -> None:
    text = load_text(folder(tmp_path))
    assert text.chat_template is None
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions.*EngineConfig\(chat_template=FILE\)"):
        text.render_chat(CHAT)


def test_eos_from_config_json(tmp_path: Path) -> None:
    assert load_text(folder(tmp_path, config={"eos_token_id": 9})).eos_ids == {9}


def test_truncation_in_the_file_is_not_ours(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    assert len(load_text(folder(tmp_path, tokenizer)).encode("a longer text")) == 13


def test_folders_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*AutoTokenizer"):
        load_text(ModelSource("folder", tmp_path, "x"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_text(ModelSource("folder", tmp_path, "x"))
    source = folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_text(source)


def test_tokens_for_people_and_for_the_wire() -> None:
    text = Text.from_live(byte_level_tokenizer())
    assert text.token_bytes(0xE1) == b"\xe1"
    assert text.token_text(0xE1) == "\ufffd"
    assert text.token_text(EOS) == "<end>"
    assert text.token_bytes(EOS) == b"<end>"


def test_threads_share_a_text() -> None:
    text = Text.from_live(byte_level_tokenizer())

    def round_trip(line: str) -> str:
        return text.decode(text.encode(line))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, SENTENCES * 4)) == SENTENCES * 4


# Live tokenizers


def test_a_transformers_tokenizer() -> None:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<end>")
    tokenizer.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    text = Text.from_live(tokenizer)
    assert text.eos_ids == {EOS}
    assert text.bos_id is None
    assert text.encode_chat(CHAT) == [*b"hi", EOS]
    tokenizer("a longer text", truncation=True, max_length=3)  # leaves its settings on its own core, not on ours
    for line in SENTENCES[:20]:
        assert text.encode(line) == tokenizer.encode(line)
        assert text.decode(text.encode(line)) == line


def test_any_tokenizer() -> None:
    text = Text.from_live(PlainTokenizer())
    assert text.vocab_size == 257
    assert text.eos_ids == {EOS}
    assert text.encode("hé") == list("hé".encode())
    assert text.decode([*b"ok", EOS]) == "ok"
    assert text.token_bytes(0x41) == b"A"


def test_objects_refused() -> None:
    with pytest.raises(ConfigError, match="has no encode"):
        Text.from_live(object())


def test_a_tokenizer_with_a_decoder_of_its_own() -> None:
    """WordPiece puts spaces between words: a token's text depends on its neighbours."""
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "##ly": 3, "!": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    text = Text.from_live(tokenizer)
    assert text.decode([1, 2, 3, 4]) == "hello worldly !"
    stream = text.stream()
    parts = [stream.push([token]) for token in (1, 2, 3, 4)]
    assert "".join([*parts, stream.finish()]) == "hello worldly !"
    continued = text.stream(prompt=[1])
    assert continued.push([2]) + continued.finish() == " world"


def test_the_front_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, tonle.engine.text; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
