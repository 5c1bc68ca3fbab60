"""`ParsedChatAnswer`: answers of `POST /v1/chat/completions` whose text is more than content: thoughts and tool calls.

Does: put the parts of a choice (`answer_reading.py`) into OpenAI's shapes, whole and streamed, and into the record. Does not:
find them. Answers that are content alone stay with `ChatAnswer`, which is quicker.
"""

from __future__ import annotations

from msgspec import UNSET

from tonle.chat_formats.parts import CallArguments, CallBegins, ContentText, Part, ReasoningText
from tonle.engine.request import Delta
from tonle.engine.text import Text
from tonle.protocol import sse
from tonle.protocol.answers import Answer
from tonle.protocol.openai import ChatChunkChoice, ChatDelta, ChatMessage, ChatRequest, FinishReason
from tonle.protocol.random_ids import random_hex
from tonle.protocol.tool_fields import CallDelta, CalledFunction, WireCall
from tonle.replica.answer_parts import wire_reason
from tonle.replica.answer_reading import AnswerReading, ChoiceReader
from tonle.replica.chat_answer import ChatAnswer
from tonle.replica.generate import Envelope
from tonle.replica.submission import Submission


class ParsedChatAnswer(ChatAnswer):
    def __init__(
        self, request: ChatRequest, envelope: Envelope, submission: Submission, text: Text, reading: AnswerReading
    ) -> None:
        super().__init__(request, envelope, submission, text)
        use = reading.use
        self._as_function_call = use is not None and use.as_function_call
        self._is_named = use is not None and use.choice.name is not None
        self._counts_thoughts = reading.thinking is not None
        self._choices = [_ParsedChoice(reading) for _ in range(submission.num_choices)]

    def note(self, answer: Answer, choice: int, delta: Delta, now_s: float) -> None:
        for part in self._choices[choice].read(delta):
            match part:
                case ContentText():
                    answer.add_text(choice, part.text, now_s)
                case ReasoningText():
                    answer.add_reasoning(choice, part.text, now_s)
                case CallBegins():
                    answer.add_call(choice, part.index, self._choices[choice].call_ids[part.index], part.name, now_s)
                case CallArguments():
                    answer.add_arguments(choice, part.index, part.text, now_s)
        if self._counts_thoughts:
            self._submission.reasoning_tokens = sum(each.reader.reasoning_tokens for each in self._choices)

    def reason(self, choice: int, delta: Delta) -> FinishReason:
        if delta.finish_reason != "stop" or not self._choices[choice].reader.num_calls or self._is_named:
            return wire_reason(delta)  # a call that the caller asked for by name is no reason, as in OpenAI's API
        return "function_call" if self._as_function_call else "tool_calls"

    # -- as events

    def events(self, choice: int, delta: Delta) -> bytes:
        new = self._choices[choice].new
        if self._templates is not None and delta.logprobs is None and delta.finish_reason is None:
            return b"".join(self._event(choice, part) for part in new)
        return self._other_events(choice, delta)

    def _event(self, choice: int, part: Part) -> bytes:
        if self._templates is not None and isinstance(part, ContentText):
            return self._templates[choice].event(part.text)
        return sse.event(self._chunk([ChatChunkChoice(choice, self._wire_delta(choice, part))]))

    def _other_events(self, choice: int, delta: Delta) -> bytes:
        """Log-probabilities and token ids go with the first part: a part has no tokens of its own."""
        token_ids = delta.tokens if self._want_ids else UNSET
        chunks = [ChatChunkChoice(choice, self._wire_delta(choice, part)) for part in self._choices[choice].new]
        if not chunks and (delta.logprobs or token_ids):
            chunks = [ChatChunkChoice(choice, ChatDelta())]
        if chunks:
            chunks[0].logprobs, chunks[0].token_ids = self._logprobs(delta), token_ids
        if delta.finish_reason is not None:
            stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
            chunks.append(ChatChunkChoice(choice, ChatDelta(), None, self.reason(choice, delta), stop_reason))
        return b"".join(sse.event(self._chunk([chunk])) for chunk in chunks)

    def _first_delta(self) -> ChatDelta:
        return ChatDelta(role="assistant")  # whether there will be content is not known yet

    def _wire_delta(self, choice: int, part: Part) -> ChatDelta:
        match part:
            case ContentText():
                return ChatDelta(part.text)
            case ReasoningText():
                return ChatDelta(reasoning_content=part.text, reasoning=part.text)
            case CallBegins():
                function = CalledFunction(part.name, "")
                if self._as_function_call:
                    return ChatDelta(function_call=function)
                call_id = self._choices[choice].call_ids[part.index]
                return ChatDelta(
                    tool_calls=[CallDelta(index=part.index, id=call_id, type="function", function=function)]
                )
            case CallArguments():
                function = CalledFunction(arguments=part.text)
                if self._as_function_call:
                    return ChatDelta(function_call=function)
                return ChatDelta(tool_calls=[CallDelta(index=part.index, function=function)])

    # -- whole

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        self._choices[choice].keep()

    def _message(self, choice: int, delta: Delta) -> ChatMessage:
        parsed = self._choices[choice]
        content, reasoning = "".join(parsed.content), "".join(parsed.reasoning)
        message = ChatMessage(content if content or not (parsed.calls or reasoning) else None)
        if parsed.calls and self._as_function_call:
            message.function_call = parsed.calls[0].function
        elif parsed.calls:
            message.tool_calls = parsed.calls
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        return message


class _ParsedChoice:
    """One choice while it grows."""

    def __init__(self, reading: AnswerReading) -> None:
        self.reader = ChoiceReader(reading)
        self._id_chars = reading.format.call_id_chars
        self.new: list[Part] = []  # of the last delta
        self.call_ids: list[str] = []
        # Of an answer that is sent whole
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[WireCall] = []

    def read(self, delta: Delta) -> list[Part]:
        self.new = self.reader.read(delta)
        self.call_ids += [_call_id(self._id_chars) for part in self.new if isinstance(part, CallBegins)]
        return self.new

    def keep(self) -> None:
        """Add what is new to the whole."""
        for part in self.new:
            match part:
                case ContentText():
                    self.content.append(part.text)
                case ReasoningText():
                    self.reasoning.append(part.text)
                case CallBegins():
                    function = CalledFunction(part.name, "")
                    self.calls.append(WireCall(id=self.call_ids[part.index], function=function))
                case CallArguments():
                    function = self.calls[part.index].function
                    function.arguments = f"{function.arguments}{part.text}"


def _call_id(num_chars: int | None) -> str:
    """As OpenAI's, unless the model's template takes others alone."""
    return f"call_{random_hex(12)}" if num_chars is None else random_hex(num_chars)[:num_chars]
