"""`Conversation`: the messages so far, and which to drop when they no longer fit."""

from __future__ import annotations

from tonle.cli.backends import Message


class Conversation:
    """Owns the messages of one chat: the system message, then user and assistant in turn."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All of them, as a model is given them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Drop the last question, which got no answer."""
        self._turns.pop()

    def forget_oldest(self) -> bool:
        """Drop the oldest question with its answer. False: only the current question is left."""
        if len(self._turns) < 3:
            return False
        del self._turns[:2]
        return True

    def clear(self) -> None:
        self._turns.clear()
