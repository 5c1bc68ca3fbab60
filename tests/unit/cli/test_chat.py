"""`tonle chat`: on pipes, on a terminal, against a server and with an engine of its own."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tests.unit.cli.terminal import terminal, tonle

CTRL_C, CTRL_D, CTRL_R, UP, ALT_ENTER = "\x03", "\x04", "\x12", "\x1b[A", "\x1b\r"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"


def raw_prompts(front: FakeFront) -> list[str]:
    return [front.text.decode(generation.prompt) for generation, _ in front.submitted]


def last_question(prompt: str) -> str:
    return prompt.rpartition("<user>")[2].removesuffix("\n<assistant>")


def asked(front: FakeFront) -> list[str]:
    """The prompts it got, as one line each."""
    return [front.text.decode(generation.prompt).replace("\n", " ") for generation, _ in front.submitted]


def test_a_pipe_is_one_message_per_line() -> None:
    front = FakeFront(lambda prompt, index: f"answer {len(front.submitted)}")
    with serving(front) as url:
        done = tonle("chat", "--url", url, "--system", "be brief", stdin="one\n\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answer 1\nanswer 2\n"
    assert "tok/s" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert asked(front) == [
        "<system>be brief <user>one <assistant>",
        "<system>be brief <user>one <assistant>answer 1 <user>two <assistant>",
    ]


def test_commands() -> None:
    front = FakeFront(lambda prompt, index: "yes")
    lines = ["/help", "one", "/clear", "/system be kind", "two", "/fly", "/exit", "three"]
    with serving(front) as url:
        done = tonle("chat", "--url", url, stdin="\n".join(lines))
    assert done.stdout == "yes\nyes\n"
    assert "/system [TEXT]" in done.stderr
    assert "there is no command /fly" in done.stderr
    assert asked(front) == ["<user>one <assistant>", "<system>be kind <user>two <assistant>"]


def test_a_full_context_forgets_the_oldest_first() -> None:
    front = FakeFront(lambda prompt, index: "yes")  # its context holds 512 tokens, one per byte
    with serving(front) as url:
        done = tonle("chat", "--url", url, "--max-tokens", "100", stdin=f"{'a' * 200}\n{'b' * 200}\n")
    assert done.stdout == "yes\nyes\n"
    assert "the context is full: forgot the 2 oldest messages" in done.stderr
    assert asked(front)[-1] == f"<user>{'b' * 200} <assistant>"


def test_a_question_that_never_fits_is_refused() -> None:
    with serving(FakeFront()) as url:
        done = tonle("chat", "--url", url, stdin=f"{'a' * 600}\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")


def test_on_a_terminal() -> None:
    front = FakeFront(lambda prompt, index: "\x1b[2Jyes")
    with serving(front) as url, terminal("chat", "--url", url) as person:
        person.expect("scripted  /help for commands")
        person.expect("> ")
        person.type("one\n")
        person.expect("[2Jyes\n")
        person.expect("first token after")
        person.expect("> ")
        person.type(CTRL_D)
        assert person.wait() == 0
    assert b"\x1b[2J" not in person.raw, "control characters of a model must not reach the terminal"
    assert b"36;1m> " in person.raw, "it is in colour"


def test_ctrl_c_stops_the_answer_only() -> None:
    front = FakeFront(lambda prompt, index: "never ending")
    front.stall_after = 5
    with serving(front) as url, terminal("chat", "--url", url) as person:
        person.expect("> ")
        person.type("one\n")
        person.expect("never")
        person.type(CTRL_C)
        person.expect("stopped")
        assert front.cancelled.get(timeout=60), "the server must hear of it"
        front.stall_after = None
        person.expect("> ")
        person.type("two\n")
        person.expect("never ending")
        person.expect("> ")
        person.press(CTRL_C, until="Ctrl-D or /exit to leave")
        person.type("/exit\n")
        assert person.wait() == 0
    assert "<assistant>never <user>two" in asked(front)[1], "what was said before the stop is remembered"


def test_pasted_text_is_one_message() -> None:
    front = FakeFront(lambda prompt, index: "yes")
    with serving(front) as url, terminal("chat", "--url", url) as person:
        person.expect("> ")
        person.type(f"{PASTE_BEGINS}/etc/hosts:\r\tone\r\rtwo\r{PASTE_ENDS}\r")
        person.expect("yes")
        person.expect("> ")
        person.type("three\\\rfour\r")
        person.expect("yes")
        person.expect("> ")
        person.type('"""five\rsix"""\r')
        person.expect("yes")
        person.expect("> ")
        person.type(f"seven{ALT_ENTER}eight\r")
        person.expect("yes")
        person.expect("> ")
        person.type(CTRL_D)
        assert person.wait() == 0
    questions = [last_question(prompt) for prompt in raw_prompts(front)]
    assert questions == ["/etc/hosts:\n\tone\n\ntwo", "three\nfour", "five\nsix", "seven\neight"]


def test_text_pasted_during_an_answer_waits_for_the_prompt() -> None:
    front = FakeFront(lambda prompt, index: "yes, and no, and perhaps")
    front.delay_s = 0.2  # after each letter
    with serving(front) as url, terminal("chat", "--url", url) as person:
        person.expect("> ")
        person.type("one\r")
        person.expect("yes")
        person.type(f"{PASTE_BEGINS}pasted\rearly{PASTE_ENDS}")
        front.delay_s = 0.0
        person.expect("first token after")
        person.expect("early")
        person.type("\r")
        person.expect("first token after")
        person.type(CTRL_D)
        assert person.wait() == 0
    assert last_question(raw_prompts(front)[1]) == "pasted\nearly"
    assert "pasted" not in person.seen[: person.seen.index("first token after")], "it is not shown inside the answer"


def test_earlier_sessions_are_remembered(tmp_path: Path) -> None:
    front = FakeFront(lambda prompt, index: "yes")
    with serving(front) as url:
        for keys, enter in (("first question", "\r"), (UP, "\r"), (f"{CTRL_R}first", "\r\r")):
            with terminal("chat", "--url", url, XDG_STATE_HOME=str(tmp_path)) as person:
                person.expect("> ")
                person.type(keys)
                person.expect("question")
                person.type(enter)
                person.expect("first token after")
                person.type(CTRL_D)
                assert person.wait() == 0
        with terminal("chat", "--url", url, "--no-history", XDG_STATE_HOME=str(tmp_path)) as person:
            person.expect("> ")
            person.type("secret\r")
            person.expect("first token after")
            person.type(CTRL_D)
            assert person.wait() == 0
    assert [last_question(prompt) for prompt in raw_prompts(front)] == [*["first question"] * 3, "secret"]
    (file,) = tmp_path.rglob("chat_history")
    assert file.stat().st_mode & 0o077 == 0, "only its owner may read it"
    assert "secret" not in file.read_text()


def test_answers_wrap_at_words() -> None:
    front = FakeFront(lambda prompt, index: "word " * 22 + "end.")
    with serving(front) as url, terminal("chat", "--url", url, columns=42) as person:
        person.expect("> ")
        person.type("one\r")
        person.expect("end.\n")
        person.type(CTRL_D)
        assert person.wait() == 0
    answer = person.seen[person.seen.index("word") : person.seen.index("end.")]
    lines = [line.rpartition("\r")[2] for line in answer.split("\n")]  # what stands after a line was rewritten
    assert all(set(line.split()) <= {"word"} for line in lines), lines
    assert [len(line.split()) for line in lines] == [8, 8, 6]


def test_options_not_given_are_left_to_the_server() -> None:
    front = FakeFront(lambda prompt, index: "yes")
    with serving(front) as url:
        tonle("chat", "--url", url, stdin="one\n/set temperature 0.25\n/set seed 7\ntwo\n")
    first, second = (generation.config for generation, _ in front.submitted)
    assert (second.temperature, second.seed) == (0.25, 7)
    assert first.temperature != 0.25 and first.seed is None


def test_an_error_does_not_end_a_conversation_on_a_terminal() -> None:
    front = FakeFront(lambda prompt, index: "yes")
    front.die_after = 0
    with serving(front) as url, terminal("chat", "--url", url) as person:
        person.expect("> ")
        person.type("one\n")
        person.expect("Error: ")
        front.die_after = None
        person.expect("> ")
        person.type("two\n")
        person.expect("yes")
        person.expect("> ")
        person.type(CTRL_D)
        assert person.wait() == 0
    assert asked(front)[1] == "<user>two <assistant>"


def test_an_engine_of_its_own(tiny_folder: Path) -> None:
    done = tonle("chat", str(tiny_folder), "--device", "cpu", "--max-tokens", "5", "-t", "0", stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    first, second = (line for line in done.stderr.splitlines() if "tok" in line)
    assert first.startswith("5 tokens · ")
    assert "context" in second and "of 1024" in second


def test_a_model_without_a_template_is_refused_before_it_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_folder.iterdir():
        if "template" not in file.name:
            (bare / file.name).symlink_to(file)
    done = tonle("chat", str(bare))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: bare has no chat template: it continues text and does not answer.")
    assert "tonle run --raw" in done.stderr
