"""What the types of request fields are made of: integers that cannot overflow, and a line about each field.

Does: hold what the modules of wire types share. Does not: name any field (`openai.py`, `structured_fields.py`, `tool_fields.py`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# 64 bits: arithmetic on what a caller sends never overflows further down.
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def about(text: str) -> Meta:
    return Meta(description=text)
