"""`LLM` with a model's defaults, a conversation and a template of the user's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import TURN_END, save_folder, tiny_tokenizer
from tonle import LLM, GenerationConfig
from tonle.errors import ConfigError, InvalidRequest

HELLO = [{"role": "user", "content": "Hello"}]
BYE = [{"role": "user", "content": "Goodbye"}]
GREEDY = GenerationConfig(max_tokens=12, temperature=0, early_stopping=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return path, save_folder("llama", path)


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(str(saved[0]), default_max_tokens=9) as made:
        yield made


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    [alone] = llm.chat(HELLO, GREEDY)
    assert alone.prompt_ids == llm.tokenizer.encode_chat(HELLO) and len(alone.output_ids[0]) == 12
    both = llm.chat([HELLO, BYE], GREEDY)
    assert [result.prompt_ids for result in both] == [alone.prompt_ids, llm.tokenizer.encode_chat(BYE)]
    assert both[0].output_ids == alone.output_ids and llm.chat([], GREEDY) == []
    assert llm.generate(HELLO, GREEDY)[0].output_ids == alone.output_ids


@pytest.mark.parametrize("wrong", ["Hello", {"role": "user"}, [[]], ["Hello"], [HELLO, "Hello"], [1, 2]])
def test_chat_refuses_what_is_no_conversation(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a conversation"):
        llm.chat(wrong)


def test_chat_and_generate_refuse_an_unknown_role(llm: LLM) -> None:
    for ask in (llm.chat, llm.generate):
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role must be one of assistant, .*user, not 'usr'"):
            ask([{"role": "usr", "content": "x"}])


def test_lengths_by_default(llm: LLM) -> None:
    endless = GenerationConfig(early_stopping=False)
    assert len(llm.chat(HELLO, endless)[0].output_ids[0]) == 9
    assert len(llm.generate("Hello", endless)[0].output_ids[0]) == 128


def generate(folder: Path, prompt: list[int], config: GenerationConfig | None, **settings: Any) -> list[int]:
    with LLM(str(folder), **settings) as llm:
        return llm.generate([prompt], config)[0].output_ids[0]


@torch.inference_mode()
def by_transformers(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=12, max_new_tokens=12, do_sample=False,
                         eos_token_id=None, pad_token_id=0, **options)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_equal_transformers_with_the_models_penalty_and_without(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    """A repetition penalty is no sampling: it holds for greedy requests, unless the request or the operator says no."""
    folder, model = saved
    prompt = tiny_tokenizer().encode("the quick brown fox jumps over the quick brown dog")
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.8, "temperature": 0.9}))
    own = GenerationConfig(max_tokens=12, temperature=0, early_stopping=False, repetition_penalty=1.0)
    plain, penalized = by_transformers(model, prompt), by_transformers(model, prompt, repetition_penalty=1.8)
    assert plain != penalized
    assert generate(folder, prompt, GREEDY, generation_config=str(tmp_path)) == penalized
    assert generate(folder, prompt, own, generation_config=str(tmp_path)) == plain
    assert generate(folder, prompt, GREEDY) == plain


def test_no_config_at_all_takes_the_models(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    prompt = tiny_tokenizer().encode("the quick brown fox")
    tokens = by_transformers(model, prompt)
    override = {"temperature": 0, "max_new_tokens": 6}
    assert generate(folder, prompt, None, override_generation_config=override) == tokens[:6]


def test_every_listed_token_ends_an_answer(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    prompt = tiny_tokenizer().encode("the quick brown fox")
    tokens = by_transformers(model, prompt)
    at = next(place for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
    greedy = GenerationConfig(max_tokens=12, temperature=0)
    ended = generate(folder, prompt, greedy, override_generation_config={"eos_token_id": [319, tokens[at], TURN_END]})
    assert ended == tokens[: at + 1]


def test_a_bad_generation_config_does_not_keep_a_model_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_folder("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text("{oops")
    with caplog.at_level("WARNING"), LLM(str(tmp_path)) as llm:
        assert llm.chat(HELLO, GREEDY)
        assert TURN_END in llm.engine._front.card.eos_ids  # type: ignore[union-attr]
    assert "generation_config.json is ignored: it is not valid JSON" in caplog.text


# -- a template of the user's own


def test_a_template_file_is_used_instead_of_the_models(saved: tuple[Path, Any], tmp_path: Path) -> None:
    file = tmp_path / "loud.jinja"
    file.write_text("{% for m in messages %}{{ m.content | upper }}{{ eos_token }}{% endfor %}")
    wanted = tiny_tokenizer().encode("HELLO<|im_end|>")
    with LLM(str(saved[0]), chat_template=str(file)) as llm:
        assert llm.chat(HELLO, GREEDY)[0].prompt_ids == wanted
    with LLM(saved[1], tiny_tokenizer(), chat_template=str(file)) as live:
        assert live.chat(HELLO, GREEDY)[0].prompt_ids == wanted


@pytest.mark.parametrize(("content", "said"), [
    (b"{% for m in %}", "is broken: line 1"), (b"\xff\xfe", "it is not UTF-8 text"), (b" \n", "is empty"),
    (None, "is not a file; give the path of a Jinja file"),
])  # fmt: skip
def test_a_template_that_will_not_do_is_told_at_the_start(
    saved: tuple[Path, Any], tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        LLM(str(saved[0]), chat_template=str(file))
    assert said in caught.value.message and str(file) in caught.value.message
    assert caught.value.param == "chat_template"


def test_a_batch_may_have_more_prompts_than_results_are_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of prompts, with a bounded number of them under way at a time."""
    monkeypatch.setattr("tonle.engine.kept_results.MAX_KEPT", 5)
    monkeypatch.setattr("tonle.engine.llm._WINDOW", 8, raising=False)
    front, most = llm.engine._front, 0
    assert front is not None
    original = front.submit

    def submit(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        most = max(most, front.num_live + 1)
        return original(*args, **kwargs)

    monkeypatch.setattr(front, "submit", submit)
    prompts = [[5 + number % 50, 7] for number in range(60)]
    config = GenerationConfig(max_tokens=3, temperature=0, early_stopping=False)
    results = llm.generate(prompts, config)
    assert [result.prompt_ids for result in results] == prompts
    assert results[50].output_ids == results[0].output_ids
    assert most == 8 and len(llm.engine._results) <= 5


def test_a_prompt_that_is_refused_ends_the_batch_and_leaves_nothing_running(llm: LLM) -> None:
    assert llm.engine._front is not None
    with pytest.raises(InvalidRequest):
        llm.generate([[1, 2], [10**9]], GenerationConfig(max_tokens=500, early_stopping=False))
    for _ in range(12_000):
        if not llm.engine._front.num_live:
            break
        time.sleep(0.01)
    assert llm.engine._front.num_live == 0
