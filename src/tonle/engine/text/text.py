"""`Text`: everything between a caller's text and a model's tokens.

Does: encode, decode, chat prompts, streams of text from tokens. Does not: read files (see `load.py`), or need torch or
transformers. One per model, shared by all requests and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tonle.engine.text.codec import Codec
from tonle.engine.text.holding import Holding
from tonle.engine.text.stream import TextStream
from tonle.engine.text.template import ChatTemplate
from tonle.errors import InvalidRequest

_PROMPT_TOKENS = 4096  # as many of a prompt's last tokens tell how its text writes letters


class Text:
    """A model's tokenizer and chat template."""

    def __init__(
        self, codec: Codec, *, bos_id: int | None, eos_ids: Iterable[int], template: ChatTemplate | None
    ) -> None:
        self._codec = codec
        self._template = template
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)  # any of these ends a continuation

    @classmethod
    def from_live(cls, tokenizer: Any, chat_template: str | None = None) -> Text:
        """For a tokenizer object of `transformers` or `tokenizers`, or any with `encode(text)` and `decode(tokens)`.

        `chat_template`: the source of a template to use instead of the tokenizer's.
        """
        from tonle.engine.text.live import live_text

        return live_text(tokenizer, chat_template)

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows. A model's output may be wider: vocabularies are padded."""
        return self._codec.vocab_size

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`, with BOS where the model wants one. Other threads run meanwhile."""
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._codec.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What this token stands for. Possibly a part of a character, which is why it is bytes."""
        return self._codec.token_bytes(token)

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
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: send a prompt to /v1/completions, "
                "or give a template with --chat-template FILE"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of `render_chat`. The template writes BOS itself, so none is added."""
        prompt = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)
        return self.encode(prompt, add_special_tokens=False)

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
