"""Chat templates: messages in, the prompt's text out.

Does: read a template file, make messages what templates expect, choose the template, turn its failures into errors a
caller understands. Does not: run Jinja itself (see `sandbox.py`), or tokenize.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from tonle.child.open_files import describe
from tonle.engine.text.marks import Marks, any_of
from tonle.engine.text.sandbox import TemplateRefusedError, compile_template, run_template
from tonle.errors import ConfigError, InternalError, InvalidRequest

# Of a message, as on the wire (`protocol/openai.py`). Templates write it between special tokens, known to the model or not.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WORD = "Angkor"  # no template writes it by itself
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}  # OpenAI renamed them; templates know one name each


def read_template(file: str | Path) -> str:
    """The source of a template that a user names. Raises `ConfigError` if it cannot be read or is broken."""
    try:
        source = Path(file).expanduser().read_text(encoding="utf-8")
        compile_template(source)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template {file}: {reason}", param="chat_template") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {file} is broken: line {error.lineno}: {error.message}", param="chat_template"
        ) from error
    if not source.strip():
        raise ConfigError(f"the chat template {file} is empty", param="chat_template")
    return source


class ChatTemplate:
    """A model's template, or several by name: `default`, and `tool_use` for requests with tools."""

    def __init__(self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ...: templates write them out
        self._known_readers: dict[str, bool] = {}  # by source: what `_reads_parts` found

    @property
    def source(self) -> str:
        return self._sources.get("default") or next(iter(self._sources.values()))

    @property
    def tool_source(self) -> str:
        """For requests with tools."""
        return self._sources.get("tool_use", self.source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        marks: Marks | None = None,
    ) -> str:
        """The prompt, with `marks` in place of the special tokens the template writes. Raises `InvalidRequest` with the
        template's own words where it refuses the messages. `continue_final_message`: it ends inside of the last message."""
        source = self.tool_source if tools else self.source
        given: dict[str, Any] = {
            "messages": plain_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if extra and (taken := (given | self._special_tokens).keys() & extra.keys()):
            raise InvalidRequest(
                f"{sorted(taken)[0]!r} is set by the server and cannot be a template argument",
                param="chat_template_kwargs",
            )
        given |= extra or {}
        end = f"\ue000{secrets.token_hex(8)}"
        if continue_final_message:
            _mark_end(given["messages"], end)
        if self._reads_parts(source):
            given["messages"] = [_in_parts(message) for message in given["messages"]]
        if marks is None:
            prompt = _render(source, given | self._special_tokens)
        else:
            own = {name: marks.hide(token) for name, token in self._special_tokens.items()}
            roles = frozenset(message["role"] for message in given["messages"])
            prompt = _render_marked(source, given, own, marks, _composed(self, source, marks, roles))
        return _cut_at(prompt, end) if continue_final_message else prompt

    def _reads_parts(self, source: str) -> bool:
        """It writes contents that are lists of parts, and not those that are strings: as some of models that see images."""
        if source not in self._known_readers:
            parts = [{"type": "text", "text": _WORD}]
            self._known_readers[source] = not self._writes(source, _WORD) and self._writes(source, parts)
        return self._known_readers[source]

    def _writes(self, source: str, content: Any) -> bool:
        given = {
            "messages": [{"role": "user", "content": content}],
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        with contextlib.suppress(InvalidRequest):
            return _WORD in _render(source, given)
        return False

    def probe(self, source: str, marks: Marks, role: str) -> Iterator[str]:
        """What the template makes of short chats with this role, with marks; nothing where it refuses them."""
        own = {name: marks.hide(token) for name, token in self._special_tokens.items()}
        message, before = {"role": role, "content": "x"}, {"role": "user", "content": "x"}
        for messages in ([message], [before, message], [message, before]):
            with contextlib.suppress(InvalidRequest):
                yield _render(source, {"messages": messages, "add_generation_prompt": True, **own}, marks)


@lru_cache(maxsize=256)
def _composed(template: ChatTemplate, source: str, marks: Marks, roles: frozenset[str]) -> frozenset[str]:
    """Special tokens that the template does not name but writes in pieces, as in `'<|' + message.role + '|>'`."""
    prompts = [prompt for role in roles for prompt in template.probe(source, marks, role)]
    return frozenset().union(*map(marks.texts_in, prompts))


def _render_marked(
    source: str, given: dict[str, Any], own: dict[str, str], marks: Marks, composed: frozenset[str]
) -> str:
    """The prompt with marks. `given` comes from the caller, `own` is the template's."""
    if not composed:
        return _render(source, given | own, marks)
    # No mark stands for these in the template. So the caller's are marked, with other marks, and those left are its own.
    quotes = Marks(composed)
    prompt = _render(source, _map_strings(given, quotes.hide) | own, marks)
    return quotes.show(any_of(composed).sub(lambda found: marks.of[found[0]], prompt))


def _mark_end(messages: list[dict[str, Any]], mark: str) -> None:
    """Put `mark` behind the last message's content."""
    messages[-1]["content"] = f"{messages[-1]['content'] or ''}{mark}"


def _cut_at(prompt: str, mark: str) -> str:
    before, found, _ = prompt.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the chat template does not write the content of the last message",
            param="continue_final_message",
        )
    return before


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `messages` with contents as strings and tool arguments as objects, which is what templates read."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_role(role: str, where: str) -> None:
    """Raises `InvalidRequest`."""
    if role not in ROLES:
        raise InvalidRequest(f"{where} must be one of {', '.join(sorted(ROLES))}, not {role!r:.60}", param=where)


def _plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", param=where)
    check_role(message["role"], f"{where}.role")
    plain = dict(message)
    plain["role"] = _TEMPLATE_ROLES.get(message["role"], message["role"])
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part, f"{where}.content") for part in content)
    elif content is None:
        plain["content"] = None if calls else ""  # templates tell a bare tool call by its missing content
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise InvalidRequest(f"{where} has a part of type {kind!r}; this model takes text only", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where} has a text part whose text is not a string", param=where)
    text: str = part["text"]
    return text


def _plain_call(call: Any) -> Any:
    """OpenAI sends a call's arguments as a string of JSON; templates write them out as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call  # a model's earlier mistake; the template gets to see it as it was
    return {**call, "function": {**function, "arguments": arguments}}


def _render(source: str, variables: dict[str, Any], marks: Marks | None = None) -> str:
    show = str if marks is None else marks.show
    try:
        return run_template(source, variables, marks)
    except TemplateRefusedError as error:
        raise InvalidRequest(show(str(error)), param="messages") from None
    except RecursionError:
        raise InvalidRequest("the model's chat template failed: it calls itself without end") from None
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"the model's chat template is broken: line {error.lineno}: {error.message}") from error
    except OSError as error:  # no template opens files: it is the system that refuses
        raise InternalError(f"the chat template could not be run: {describe(error)}") from error
    except Exception as error:  # a template is a program: it can fail in any way Python can
        reason = show(str(error)) or type(error).__name__
        raise InvalidRequest(f"the model's chat template failed on these messages: {reason}") from error
