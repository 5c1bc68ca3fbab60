"""The table of vLLM's flags agrees with our settings."""

from __future__ import annotations

import pytest

from tonle.config.serve import SETTINGS
from tonle.config.vllm import VLLM_FLAGS, VllmFlag


@pytest.mark.parametrize("flag", VLLM_FLAGS.values(), ids=VLLM_FLAGS)
def test_a_flag_sets_something_or_says_what_to_do(flag: VllmFlag) -> None:
    assert flag.name not in SETTINGS or flag.name == "model", "the flags of settings have their own names already"
    if flag.setting is not None:
        assert flag.setting in SETTINGS and not flag.anyway and not flag.refusal
        assert flag.switch == isinstance(SETTINGS[flag.setting].default, bool)
    elif flag.read_all is None:
        assert flag.refusal or flag.anyway == ("*",)
    if flag.switch and flag.setting is None:
        assert set(flag.anyway) <= {"true", "false", "*"}


def test_flags_that_a_refusal_names_exist() -> None:
    ours = {setting.flag for setting in SETTINGS.values()} | {"--backend", "--revision", "--local-dir"}
    for flag in VLLM_FLAGS.values():
        named = {word.strip(".,;()`") for word in flag.refusal.split() if word.startswith("--")}
        assert named <= ours, flag.name


@pytest.mark.parametrize(
    ("text", "settings"),
    [('{"method": "ngram"}', {"speculation": "suffix"}),
     ('{"method": "suffix", "num_speculative_tokens": 5}', {"speculation": "suffix", "speculation_length": 5}),
     ('{"method": "draft_model", "model": "org/small", "num_speculative_tokens": 3}',
      {"speculation": "draft_model", "speculation_model": "org/small", "speculation_length": 3}),
     ('{"model": "org/small"}', {"speculation": "draft_model", "speculation_model": "org/small"})],
)  # fmt: skip
def test_speculation_by_text_or_by_a_draft_model_is_taken(text: str, settings: dict[str, object]) -> None:
    assert VLLM_FLAGS["speculative_config"].translate(text) == settings
    for name, value in settings.items():
        assert SETTINGS[name].type.read(value) == value
    assert VLLM_FLAGS["speculative_model"].translate("[ngram]") == {"speculation": "suffix"}
    taken = {"speculation": "draft_model", "speculation_model": "org/small-model"}
    assert VLLM_FLAGS["speculative_model"].translate("org/small-model") == taken


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"method": "eagle3", "model": "x"}', "methods are suffix"), ('{"method": "draft_model"}', "methods are suffix"),
     ('{"method": "ngram", "prompt_lookup_max": 4}', "prompt_lookup_max"), ("ngram", "must be a JSON object"),
     ("[1]", "must be")],
)  # fmt: skip
def test_other_speculation_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLM_FLAGS["speculative_config"].translate(text)
