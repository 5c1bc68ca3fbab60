"""Settings of a gateway that are lists of objects: backends, experiments, shadows; and the aliases of models.

Does: give each object a type, and refuse keys it does not have. Does not: act on them.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tonle.config.allowed_values import allowed_values
from tonle.config.observe import MAX_PRICE
from tonle.config.values import ValueType

ItemT = TypeVar("ItemT", bound=msgspec.Struct)

NAME_PATTERN = r"[A-Za-z0-9._/:\-]{1,128}"
Name = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$")]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[int, Meta(ge=1)]
Price = Annotated[float, Meta(ge=0, le=MAX_PRICE)]
_KINDS: dict[type, str] = {dict: "a mapping", str: "a text", type(None): "nothing"}


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server that answers: a Tonle replica, vLLM, or anything that speaks OpenAI's API."""

    url: str  # http://host:8000, with or without /v1
    name: Name | None = None  # in logs, metrics and the audit; default: host:port
    api_key: str | None = None  # this server's own key; callers' keys are never sent to it
    api_key_env: str | None = None  # or the variable that holds it
    models: tuple[Name, ...] = ()  # default: what its /v1/models lists
    kind: Literal["auto", "tonle", "vllm", "openai"] = "auto"  # auto: found out by asking it
    role: Literal["any", "prefill", "decode"] = "any"
    length: Literal["any", "short", "long"] = "any"  # which prompts it is meant for, see length_threshold
    weight: Annotated[float, Meta(gt=0)] = 1.0  # its share of the load, against other backends
    share: Share | None = None  # it gets this share of the requests, and never more; default: by load
    max_concurrent: Positive | None = None  # default: the gateway's
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    price_per_hour: Price | None = None  # of its machine; default: the gateway's
    kv_events: Annotated[str, Meta(pattern="^(tcp|ipc)://")] | None = None  # where it publishes its KV events
    region: Name | None = None  # where it is; default: where the gateway is


class ArmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side of an experiment."""

    name: Name
    weight: Annotated[float, Meta(ge=0)]  # against the other arms
    model: Name | None = None  # send to this model instead
    backend: Name | None = None  # or only to this backend


class ExperimentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests for `model` are split between arms; a user stays in one."""

    name: Name
    model: Name
    arms: Annotated[tuple[ArmConfig, ...], Meta(min_length=2)]
    share: Share = 1.0  # of users who take part; the rest are served as if there were no experiment


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A copy of some requests for `model` also goes to `to_model`; the caller does not see its answer."""

    model: Name
    to_model: Name
    share: Share = 1.0
    record: bool = False  # keep the copy's answer as a record of its own, beside the caller's


def objects(item_type: type[ItemT], wanted: str, *, short: str | None = None) -> ValueType:
    """A list of `item_type`. In text: YAML; or, with `short`, values of that one field separated by commas."""

    def read(value: object) -> tuple[ItemT, ...]:
        items = _items(value, short)
        if not isinstance(items, list | tuple):
            raise ValueError(f"must be {wanted}, not {_KINDS.get(type(items), 'one value')}")
        return tuple(
            item if isinstance(item, item_type) else read_object(item, item_type, f"must be {wanted}: entry {number}")
            for number, item in enumerate(items, 1)
        )

    return ValueType(
        "URL" if short else "YAML", read, lambda read_items: "" if not read_items else str(len(read_items))
    )


def read_object(item: Any, item_type: type[ItemT], complaint: str) -> ItemT:
    """Raises `ValueError`: the complaint, and what is wrong."""
    try:
        return msgspec.convert(item, item_type)
    except msgspec.ValidationError as error:
        name = item.get("name") if isinstance(item, dict) else None
        which = f" ({name})" if isinstance(name, str) else ""
        raise ValueError(f"{complaint}{which} {_words(str(error), item_type)}") from None


def mapping(wanted: str) -> ValueType:
    """Names to names."""

    def read(value: object) -> tuple[tuple[str, str], ...]:
        items = read_yaml(value) if isinstance(value, str) else value
        try:
            return tuple(msgspec.convert(items, dict[Name, Name]).items())
        except msgspec.ValidationError as error:
            raise ValueError(f"must be {wanted}: it {_words(str(error), dict[Name, Name])}") from None

    return ValueType("YAML", read, lambda pairs: ", ".join("=".join(pair) for pair in pairs))


def _items(value: object, short: str | None) -> Any:
    """A flag gives a list of texts, a variable one text, a file a list of objects."""
    if isinstance(value, str):
        if short and not value.lstrip().startswith(("[", "-", "{")):
            return [{short: part.strip()} for part in value.split(",")]
        return read_yaml(value)
    if short and isinstance(value, list | tuple):
        return [each for item in value for each in (_items(item, short) if isinstance(item, str) else [item])]
    return value


def read_yaml(text: str) -> Any:
    """Or JSON, which is read a hundred times faster. Raises `ValueError` without a word of the text: there may be keys in it."""
    import yaml

    if text.lstrip().startswith(("[", "{")):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return msgspec.json.decode(text)
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("must be YAML, and is nested too deeply") from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"; it cannot be read at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"must be YAML{where}") from None


def _words(error: str, item_type: Any) -> str:
    """msgspec's message after the subject. Example: "lacks 'url'"."""
    found = re.search(r" - at `(?:key in )?\$\.?(.*)`$", error)
    path = found.group(1) if found else ""
    said = (error[: found.start()] if found else error).replace("`", "'")
    if said.startswith("Invalid enum value") and (words := allowed_values(item_type, path)):
        return f"has {path}: {said.removeprefix('Invalid enum value ')}, which is not one of {', '.join(words)}"
    where = f" (at {path})" if path else ""
    for theirs, ours in (
        ("Object missing required field", "lacks"),
        ("Object contains unknown field", "has an unknown field"),
    ):
        if said.startswith(theirs):
            return f"{ours} {said.removeprefix(theirs).strip()}{where}"
    return f"is not right: {said}{where}"
