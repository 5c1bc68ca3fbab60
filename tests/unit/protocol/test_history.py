"""Which turns of a conversation are kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.protocol.history import RecentHistory, recent

Message = tuple[str, int]  # role, and how long it is

U, A, S, T = ("user", 10), ("assistant", 10), ("system", 10), ("tool", 10)


def cut(history: list[Message], *, window: int | None = None, room: int = 10**9) -> RecentHistory[Message]:
    return recent(history, role=lambda m: m[0], window=window, fits=lambda kept: sum(m[1] for m in kept) <= room)


def test_whole_turns_are_kept() -> None:
    history = [S, U, A, U, A, T, A, U, A]
    assert cut(history).messages == history and cut(history).messages_dropped == 0
    assert cut(history, window=3).messages == [S, U, A]
    assert cut(history, window=5).messages == [S, U, A]  # the turn of four does not fit
    assert cut(history, window=6).messages == [S, U, A, T, A, U, A]
    assert cut(history, room=70).messages == [S, U, A, T, A, U, A]
    assert cut(history, room=69).messages == [S, U, A]
    assert cut(history, room=9).messages == [S]  # whether that fits is the caller's question


def test_what_was_dropped_is_told_with_the_reason() -> None:
    found = cut([S, U, A, U, A, U, A], window=4, room=30)
    assert (found.messages, found.turns_dropped) == ([S, U, A], 2)
    assert (found.over_window, found.over_length, found.messages_dropped) == (2, 2, 4)


def test_an_answer_to_no_question_is_a_turn_of_its_own() -> None:
    assert cut([A, U, A]).messages == [A, U, A]  # a greeting
    assert cut([A, U, A], window=2).messages == [U, A]
    assert cut([S, S, A, U], window=1).messages == [S, S, U]
    assert cut([]).messages == [] and cut([S]).messages == [S]


messages = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.integers(0, 30)), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(messages, st.none() | st.integers(1, 12), st.integers(0, 200))
def test_as_many_whole_turns_as_fit_and_no_more(history: list[Message], window: int | None, room: int) -> None:
    """Against the slow way: try every number of turns."""
    found = cut(history, window=window, room=room)
    first = 0
    while first < len(history) and history[first][0] == "system":
        first += 1
    turns: list[list[Message]] = []
    for message in history[first:]:
        if message[0] == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    wanted = history[:first]
    for count in range(1, len(turns) + 1):
        newest = [message for turn in turns[-count:] for message in turn]
        if (window is not None and len(newest) > window) or sum(m[1] for m in history[:first] + newest) > room:
            break
        wanted = history[:first] + newest
    assert found.messages == wanted
    assert found.messages_dropped == len(history) - len(wanted)
    kept = wanted[first:]
    assert not found.messages_dropped or not kept or kept[0][0] == "user"
