"""Text in, tokens out, and back: tokenizer, chat template, and streams that never show a broken letter.

Does: encode, decode, render chats, cut text where readers see a boundary. Does not: need torch or transformers, or
know of requests. Runs in the caller's process; everything but a `TextStream` is safe to share between threads.

    load_text     a model's files -> Text
    Text          a model's tokenizer and chat template
    TextStream    tokens of one continuation -> text that may be shown
"""

from __future__ import annotations

from tonle.engine.text.load import load_text
from tonle.engine.text.stream import TextStream
from tonle.engine.text.text import Text

__all__ = ["Text", "TextStream", "load_text"]
