from __future__ import annotations

from tonle.cli.conversation import Conversation


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


def test_turns_and_system() -> None:
    conversation = Conversation("be brief")
    conversation.ask("a")
    conversation.answer("b")
    assert conversation.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    conversation.clear()
    assert contents(conversation) == ["be brief"]


def test_forgetting_goes_by_pairs_and_spares_the_present_question() -> None:
    conversation = Conversation("system")
    for question, answer in (("a", "b"), ("c", "d")):
        conversation.ask(question)
        conversation.answer(answer)
    conversation.ask("e")
    assert conversation.forget_oldest()
    assert contents(conversation) == ["system", "c", "d", "e"]
    assert conversation.forget_oldest()
    assert not conversation.forget_oldest()
    assert contents(conversation) == ["system", "e"]


def test_a_question_without_an_answer_can_be_taken_back() -> None:
    conversation = Conversation()
    conversation.ask("a")
    conversation.take_back()
    assert conversation.messages == []
