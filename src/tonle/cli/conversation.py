"""`Conversation`: what was said so far, and what to forget when it no longer fits."""

from __future__ import annotations

from tonle.cli.voices import Message


class Conversation:
    """Owns the messages of one chat: after the system's, user and assistant take turns."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """As a model is asked."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the question that got no answer."""
        self._turns.pop()

    def forget_oldest(self) -> bool:
        """Drop the oldest question with its answer. False: only the present question is left."""
        if len(self._turns) < 3:
            return False
        del self._turns[:2]
        return True

    def reset(self) -> None:
        self._turns.clear()
