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
    else:
        assert flag.refusal or flag.anyway == ("*",)
    if flag.switch and flag.setting is None:
        assert set(flag.anyway) <= {"true", "false", "*"}


def test_flags_that_a_refusal_names_exist() -> None:
    ours = {setting.flag for setting in SETTINGS.values()} | {"--backend", "--revision", "--local-dir"}
    for flag in VLLM_FLAGS.values():
        named = {word.strip(".,;()`") for word in flag.refusal.split() if word.startswith("--")}
        assert named <= ours, flag.name
