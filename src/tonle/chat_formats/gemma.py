"""Gemma 2 and 3: no tags for tools, so the system prompt asks for JSON, `{"name": …, "parameters": {…}}`, as Google's guide does.

Gemma likes to put calls into a block of code, `tool_code` among others, which is taken off.
"""

from __future__ import annotations

from collections.abc import Mapping

from tonle.chat_formats.plain_json import BLOCKS, PlainJSON


class Gemma(PlainJSON):
    name = "gemma"
    key = "parameters"
    blocks: Mapping[str, str] = {**BLOCKS, "```tool_code\n": "```", "```tool_call\n": "```"}
