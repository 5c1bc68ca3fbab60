"""The commands inside a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonle.cli.backends import AnswerOptions
from tonle.cli.chat_commands import Commands
from tonle.cli.conversation import Conversation
from tonle.errors import InvalidRequest


@pytest.fixture
def commands() -> Commands:
    conversation = Conversation("be brief")
    conversation.ask("one")
    conversation.answer("two\nlines")
    return Commands("tiny", conversation, AnswerOptions())


def test_help_names_every_command(commands: Commands) -> None:
    shown = commands.run("/help")
    assert all(name in shown for name in commands.names)


def test_options_start_unset_and_can_be_set_and_unset(commands: Commands) -> None:
    assert commands.run("/set") == "temperature default, top_p default, max_tokens default, seed default"
    commands.run("/set temperature 0.5")
    commands.run("/set max-tokens 20")
    assert commands.options == AnswerOptions(temperature=0.5, max_tokens=20)
    assert commands.run("/set temperature default").startswith("temperature default")
    assert commands.options == AnswerOptions(max_tokens=20)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set speed 3", "there is no option 'speed'; there are temperature"),
        ("/set temperature hot", "temperature must be a number from 0 to 100, or default, not 'hot'"),
        ("/set temperature", "temperature must be a number from 0 to 100, or default"),
        ("/set temperature nan", "must be a number"),
        ("/set top_p 0", "above 0"),
        ("/set max_tokens 1.5", "a whole number"),
        ("/save", "give a file"),
        ("/save /no/such/folder/x", "cannot write /no/such/folder/x: No such file"),
        ("/fly", "there is no command /fly; /help lists them"),
    ],
)
def test_what_cannot_be_done_is_explained(commands: Commands, line: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        commands.run(line)
    assert said in error.value.message
    assert commands.options == AnswerOptions()


def test_system_and_clear(commands: Commands) -> None:
    assert commands.run("/system") == "system message: be brief"
    commands.run("/system be kind")
    commands.run("/clear")
    assert commands._conversation.messages == [{"role": "system", "content": "be kind"}]


def test_a_conversation_is_saved_but_no_file_of_others_is_replaced(commands: Commands, tmp_path: Path) -> None:
    assert commands.run(f"/save {tmp_path}/chat.json").startswith("saved 3 messages")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["model"] == "tiny" and [each["role"] for each in saved["messages"]] == ["system", "user", "assistant"]
    commands.run(f"/save {tmp_path}/chat.md")
    assert "## Assistant\n\ntwo\nlines\n" in (tmp_path / "chat.md").read_text()
    commands.run(f"/save {tmp_path}/chat.md")  # our own: again
    (tmp_path / "other").write_text("precious")
    with pytest.raises(InvalidRequest, match="exists already"):
        commands.run(f"/save {tmp_path}/other")
    assert (tmp_path / "other").read_text() == "precious"
