"""The operator's command: what is filled in is one word for the shell, and nothing else can be filled in."""

from __future__ import annotations

import pytest

from tonle.errors import ConfigError
from tonle.scaleout.rollout.command import filled


def test_names_and_addresses_are_one_word_each() -> None:
    """They come from the gateway, and there from whoever lists its backends."""
    command = filled("restart {name} --at {url} {{x}}", name="a; rm -rf ~", url="http://h/$(id)")
    assert command == "restart 'a; rm -rf ~' --at 'http://h/$(id)' {x}"


@pytest.mark.parametrize("template", ["{}", "{host}", "{name", "{name.host}", "{name[host]}", "{name!x}", "{name:d}"])
def test_nothing_else_can_be_filled_in(template: str) -> None:
    with pytest.raises(ConfigError, match="can be filled in"):
        filled(template, name="a", url="http://h")
