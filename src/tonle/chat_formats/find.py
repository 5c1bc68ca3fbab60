"""Which format a model speaks: by name, or by what its chat template writes.

Does: names, the names that vLLM has for the same formats, the tags by which a template is known. Does not: read or run templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonle.chat_formats.base_format import BaseFormat
from tonle.chat_formats.chat_format import ChatFormat, ThinkingTags
from tonle.chat_formats.function_gemma import FunctionGemma
from tonle.chat_formats.gemma import Gemma
from tonle.chat_formats.gpt_oss import THINKING as GPT_OSS_THINKING
from tonle.chat_formats.gpt_oss import GptOss
from tonle.chat_formats.hermes import Hermes
from tonle.chat_formats.llama3 import Llama3
from tonle.chat_formats.mistral import Mistral
from tonle.chat_formats.phi4 import Phi4
from tonle.chat_formats.plain_json import PlainJSON
from tonle.chat_formats.pythonic import Pythonic
from tonle.chat_formats.qwen3_coder import Qwen3Coder
from tonle.errors import ConfigError


def _tags(start: str, end: str) -> ThinkingTags:
    return ThinkingTags(start, end, f"\n{end}\n\n")


FORMATS: dict[str, type[BaseFormat]] = {
    kind.name: kind
    for kind in (Hermes, Qwen3Coder, Llama3, Pythonic, Mistral, Phi4, Gemma, FunctionGemma, GptOss, PlainJSON)
}
# Names that vLLM and SGLang have for them.
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "phi4_mini_json": "phi4",
    "granite": "phi4",
    "openai": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "xlam": "json",
}
# What a template writes: the first format of which it has all tags.
_TEMPLATE_TAGS: list[tuple[str, tuple[str, ...]]] = [
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("functiongemma", ("<start_function_call>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>", "tools")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4", ("<|tool_call|>",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("phi4", ("functools[",)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3", ("ipython", '"parameters"')),
    ("gemma", ("<start_of_turn>",)),
]
# Of formats that are not known here, but look like one that is.
_OTHERS = ("<arg_key>", "<tool_calls>", "ns_token")

THINKING: dict[str, ThinkingTags | None] = {
    "gpt_oss": GPT_OSS_THINKING,
    "mistral": _tags("[THINK]", "[/THINK]"),
    "seed_oss": _tags("<seed:think>", "</seed:think>"),
    "thinking": _tags("<thinking>", "</thinking>"),
    "think": _tags("<think>", "</think>"),
    "none": None,
}
_THINK = (
    "deepseek_r1",
    "deepseek_v3",
    "qwen3",
    "qwq",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "step3",
    "ernie45",
)
THINKING_ALIASES = {"openai_gptoss": "gpt_oss", "gpt-oss": "gpt_oss", **dict.fromkeys(_THINK, "think")}


def find_format(
    template: str | None, name: str = "auto", *, special_tokens: Mapping[str, int] | None = None
) -> ChatFormat:
    """The format of this name, or the one that the chat template speaks. Raises `ConfigError` for a name that is not known.

    `special_tokens`: the ids of the tokenizer's special tokens, by their texts: grammars need them to ask for a tag that is one.
    """
    template = template or ""
    own = _format_of(template)
    chosen = own or "json" if name == "auto" else ALIASES.get(name, name)
    if chosen not in FORMATS:
        names = ", ".join(["auto", *FORMATS, *ALIASES])
        raise ConfigError(f"there is no tool call format {name!r}; the names are {names}", param="tool_call_parser")
    # A template may tell the model about tools in a format that is not known here: then a name that is given is believed.
    has_tools = _has_tools(template) and (own == chosen or (own is None and name != "auto"))
    return FORMATS[chosen](template, has_tools=has_tools, special_tokens=special_tokens)


def find_thinking(template: str | None, name: str = "auto") -> ThinkingTags | None:
    """The tags of thoughts of this name, or those in the chat template. Raises `ConfigError` for a name that is not known."""
    if name == "auto":
        return next((tags for tags in THINKING.values() if tags and _has_tags(template or "", tags)), None)
    known = THINKING_ALIASES.get(name, name)
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
    """Whether it reads the variable `tools`; Phi-4-mini's has a key of messages that is called so."""
    return re.search(r"(?<![\w.'\"])tools\b(?!['\"])", template) is not None


def _has_tags(template: str, tags: ThinkingTags) -> bool:
    """A template that takes thoughts out of older messages may know the closing tag alone; gpt-oss's is no tag of thoughts."""
    return tags.start in template or (tags is not GPT_OSS_THINKING and tags.end in template)
