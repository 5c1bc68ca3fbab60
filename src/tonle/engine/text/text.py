"""`Text`: everything between a caller's text and a model's tokens.

Does: encode, decode, chat prompts, streams of text from tokens. Does not: read files (see `load.py`), or need torch or
transformers. One per model, shared by all requests and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tonle.engine.text.codec import Codec
from tonle.engine.text.holding import Holding
from tonle.engine.text.marks import Marks
from tonle.engine.text.stream import TextStream
from tonle.engine.text.template import ChatTemplate
from tonle.errors import ContextOverflow, InvalidRequest

_PROBE_CHARS = 16  # per token of the context: about four times what a token of English has
_PROMPT_TOKENS = 4096  # as many of a prompt's last tokens tell how its text writes letters


class Text:
    """A model's tokenizer and chat template."""

    def __init__(
        self, codec: Codec, *, bos_id: int | None, eos_ids: Iterable[int], template: ChatTemplate | None,
        special_tokens_in_content: str = "text",
    ) -> None:  # fmt: skip
        """`special_tokens_in_content`: whether a special token that a caller writes in a chat is "text" or "special"."""
        self._codec = codec
        self._template = template
        # None: nothing is marked, and whatever looks like a special token is one
        self.special_tokens = codec.special_tokens()  # by what they are written as
        self._marks = Marks(self.special_tokens) if special_tokens_in_content == "text" else None
        self._marked = None if self._marks is None else codec.marked_encoder(self._marks)
        self.max_tokens: int | None = None  # of a prompt, set once the model is known; see `_check_length`
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)  # any of these ends a continuation

    @classmethod
    def from_live(
        cls, tokenizer: Any, chat_template: str | None = None, *, special_tokens_in_content: str = "text"
    ) -> Text:
        """For a tokenizer object of `transformers` or `tokenizers`, or any with `encode(text)` and `decode(tokens)`.

        `chat_template`: the source of a template to use instead of the tokenizer's.
        """
        from tonle.engine.text.live import live_text

        return live_text(tokenizer, chat_template, special_tokens_in_content=special_tokens_in_content)

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows. A model's output may be wider: vocabularies are padded."""
        return self._codec.vocab_size

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    @property
    def tool_template(self) -> str | None:
        """The one that chats with tools are rendered with, which may be another."""
        return None if self._template is None else self._template.tool_source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`, with BOS where the model wants one. Other threads run meanwhile. Raises `ContextOverflow`."""
        self._check_length(text)
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Refuse a text that is far too long for the model by its beginning: all of it could take many seconds, and a GB.

        A beginning has as many tokens as in the whole text, but for its last word: hence the margin.
        """
        if self.max_tokens is None or len(text) <= self.max_tokens * _PROBE_CHARS:
            return
        beginning = text[: self.max_tokens * _PROBE_CHARS]
        num_tokens = len(self._codec.encode(beginning, add_special_tokens=False))
        if num_tokens > self.max_tokens * 1.25 + 64:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters; the first {len(beginning)} alone are {num_tokens} tokens, and the "
                f"model's context is {self.max_tokens} tokens. Shorten the prompt."
            )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._codec.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What this token stands for. Possibly a part of a character, which is why it is bytes."""
        return self._codec.token_bytes(token)

    def check_tokens_are_bytes(self) -> None:
        """Raise `InvalidRequest` unless text is the bytes of its tokens: only then is known which ones a grammar allows."""
        if not self._codec.tokens_are_bytes:
            raise InvalidRequest(
                "structured output needs to know what bytes each token stands for, which this model's tokenizer does not tell; a "
                "byte-level or SentencePiece tokenizer (tokenizer.json) does",
                param="structured",
            )

    def token_text(self, token: int) -> str:
        """One token for people to look at; a part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt the model's template makes of a chat. `extra`: further template arguments (`enable_thinking`)."""
        prompt = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)
        return prompt if self._marks is None else self._marks.show(prompt)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of `render_chat`. The template writes BOS itself, so none is added.

        `continue_final_message`: they end inside of the last message, which the model goes on with.
        Special tokens are those of the template; what a caller writes is text, unless the settings say otherwise.
        """
        prompt = self._render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=extra,
        )
        if self._marks is None or self._marked is None:
            return self.encode(prompt, add_special_tokens=False)
        self._check_length(prompt)
        if self._marked.is_needed(prompt):
            return self._marked.encode(prompt)
        return self.encode(self._marks.show(prompt), add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """With marks in place of the template's special tokens."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: continue a text instead (a string in Python, /v1/completions on a server), "
                "or give a template (EngineConfig(chat_template=FILE), --chat-template FILE)"
            )
        return self._template.render(messages, marks=self._marks, **options)

    def stream(
        self,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_text: bool = False,
        skip_special_tokens: bool = True,
        hold_clusters: str = "auto",
    ) -> TextStream:
        """For the tokens that continue `prompt`, which decides whether a leading space is the text's own.

        `hold_clusters`: whether the last letter waits for marks that may follow it; see `holding.py`.
        """
        detokenizer = self._codec.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
        before = "" if hold_clusters == "always" else self.decode(prompt[-_PROMPT_TOKENS:])
        holding = Holding(hold_clusters, prompt=before)
        return TextStream(detokenizer, holding, stop=stop, include_stop_text=include_stop_text)
