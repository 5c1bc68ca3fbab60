"""Which format a model speaks: by name, or by what its chat template writes.

Does: names, the names that vLLM has for the same formats, the tags by which a template is known. Does not: read or run templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonle.chat_formats.base_format import BaseFormat
from tonle.chat_formats.chat_format import ChatFormat, ThinkingTags
from tonle.chat_formats.hermes import Hermes
from tonle.chat_formats.plain_json import PlainJSON
from tonle.errors import ConfigError

FORMATS: dict[str, type[BaseFormat]] = {kind.name: kind for kind in (Hermes, PlainJSON)}
ALIASES = {"qwen": "hermes", "qwen25": "hermes"}
# The first whose tags are all in the template. Format, tags.
_TEMPLATE_TAGS: list[tuple[str, tuple[str, ...]]] = [
    ("hermes", ("<tool_call>", "</tool_call>")),
]
# Of formats that are not known here, which look like one that is.
_OTHERS = ("<arg_key>",)

THINKING: dict[str, ThinkingTags | None] = {
    "think": ThinkingTags(),
    "thinking": ThinkingTags("<thinking>", "</thinking>"),
    "none": None,
}
THINKING_ALIASES = {"deepseek_r1": "think", "qwen3": "think"}


def find_format(
    template: str | None, name: str = "auto", *, special_tokens: Mapping[str, int] | None = None
) -> ChatFormat:
    """The format of this name, or the one that the chat template speaks. Raises `ConfigError` for a name that is not known.

    `special_tokens`: the ids of the tokenizer's special tokens, by their texts: grammars need them to ask for a tag that is one.
    """
    known = ALIASES.get(name, name)
    found = _format_of(template or "") if known == "auto" else known
    if found is not None and found not in FORMATS:
        names = ", ".join(["auto", *FORMATS, *ALIASES])
        raise ConfigError(f"there is no tool call format {name!r}; the names are {names}", param="tool_call_parser")
    has_tools = found is not None and _has_tools(template or "")
    return FORMATS[found or "json"](template_has_tools=has_tools, special_tokens=special_tokens)


def find_thinking(template: str | None, name: str = "auto") -> ThinkingTags | None:
    """The tags of thoughts of this name, or those in the chat template. Raises `ConfigError` for a name that is not known."""
    known = THINKING_ALIASES.get(name, name)
    if known == "auto":
        found = (tags for tags in THINKING.values() if tags and tags.end in (template or ""))
        return next(found, None)
    if known not in THINKING:
        names = ", ".join(["auto", *THINKING, *THINKING_ALIASES])
        raise ConfigError(f"there is no reasoning format {name!r}; the names are {names}", param="reasoning_parser")
    return THINKING[known]


def opens_thinking(prompt_tail: str, tags: ThinkingTags) -> bool:
    """Whether a prompt that ends so ends inside of a thought."""
    return prompt_tail.rfind(tags.start) > prompt_tail.rfind(tags.end)


def _format_of(template: str) -> str | None:
    """None: its calls are written in no format that is known here, or it has none."""
    if any(tag in template for tag in _OTHERS):
        return None
    return next((name for name, tags in _TEMPLATE_TAGS if all(tag in template for tag in tags)), None)


def _has_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None
