"""Settings that are lists of objects: backends, experiments, shadows.

Does: give each object a type, and refuse keys it does not have. Does not: act on them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tonle.config.choices import choices
from tonle.config.kinds import Kind

RowT = TypeVar("RowT", bound=msgspec.Struct)

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/:\-]{1,128}$")]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[int, Meta(ge=1)]


class BackendRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server that answers: a Tonle replica, vLLM, or anything that speaks OpenAI's API."""

    url: str  # http://host:8000, with or without /v1
    name: Name | None = None  # in logs, metrics and the audit; default: host:port
    api_key: str | None = None  # what this server wants; callers' own keys are never sent on
    api_key_env: str | None = None  # or the variable that holds it
    models: tuple[Name, ...] = ()  # default: what its /v1/models lists
    kind: Literal["auto", "tonle", "vllm", "openai"] = "auto"  # auto: told by its answers
    role: Literal["any", "prefill", "decode"] = "any"
    length: Literal["any", "short", "long"] = "any"  # which prompts it is meant for, see length_threshold
    weight: Annotated[float, Meta(gt=0)] = 1.0  # its share of the load, against other backends
    max_concurrent: Positive | None = None  # default: the gateway's
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None


class ArmRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side of an experiment."""

    name: Name
    weight: Annotated[float, Meta(ge=0)]  # against the other arms
    model: Name | None = None  # send to this model instead
    backend: Name | None = None  # or only to this backend


class ExperimentRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests for `model` are split between arms; a user stays in one."""

    name: Name
    model: Name
    arms: Annotated[tuple[ArmRow, ...], Meta(min_length=2)]
    share: Share = 1.0  # of users who take part; the others are served as if there were no experiment


class ShadowRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A copy of some requests for `model` also goes to `to_model`; the caller never hears of its answer."""

    model: Name
    to_model: Name
    share: Share = 1.0
    record: bool = False  # keep the copy's answer as a record of its own, beside the caller's


def rows(kind: type[RowT], wanted: str, *, short: str | None = None) -> Kind:
    """A list of `kind`. In text: YAML; or, with `short`, values of that one field separated by commas."""

    def read(value: object) -> tuple[RowT, ...]:
        items = _items(value, short)
        if not isinstance(items, list | tuple):
            raise ValueError(f"must be {wanted}, not {value!r}")
        return tuple(
            item if isinstance(item, kind) else _row(item, kind, f"must be {wanted}: entry {number}")
            for number, item in enumerate(items, 1)
        )

    return Kind("URL" if short else "YAML", read, lambda read_rows: "" if not read_rows else str(len(read_rows)))


def _row(item: Any, kind: type[RowT], complaint: str) -> RowT:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        name = item.get("name") if isinstance(item, dict) else None
        which = f" ({name})" if isinstance(name, str) else ""
        raise ValueError(f"{complaint}{which} {_words(str(error), kind)}") from None


def table(wanted: str) -> Kind:
    """Names to names."""

    def read(value: object) -> tuple[tuple[str, str], ...]:
        items = _yaml(value) if isinstance(value, str) else value
        try:
            return tuple(msgspec.convert(items, dict[Name, Name]).items())
        except msgspec.ValidationError as error:
            raise ValueError(f"must be {wanted}: it {_words(str(error), dict[Name, Name])}") from None

    return Kind("YAML", read, lambda pairs: ", ".join("=".join(pair) for pair in pairs))


def _items(value: object, short: str | None) -> Any:
    """Rows as objects. A flag gives a list of texts, a variable one text, a file a list of objects."""
    if isinstance(value, str):
        if short and not value.lstrip().startswith(("[", "-", "{")):
            return [{short: part.strip()} for part in value.split(",")]
        return _yaml(value)
    if short and isinstance(value, list | tuple):
        return [row for item in value for row in (_items(item, short) if isinstance(item, str) else [item])]
    return value


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"must be YAML, not {text!r}") from None


def _words(error: str, kind: Any) -> str:
    """msgspec's message after the subject. Example: "lacks 'url'"."""
    found = re.search(r" - at `(?:key in )?\$\.?(.*)`$", error)
    path = found.group(1) if found else ""
    said = (error[: found.start()] if found else error).replace("`", "'")
    if said.startswith("Invalid enum value") and (words := choices(kind, path)):
        return f"has {path}: {said.removeprefix('Invalid enum value ')}, which is none of {', '.join(words)}"
    where = f" (at {path})" if path else ""
    for theirs, ours in (
        ("Object missing required field", "lacks"),
        ("Object contains unknown field", "has an unknown field"),
    ):
        if said.startswith(theirs):
            return f"{ours} {said.removeprefix(theirs).strip()}{where}"
    return f"is not right: {said}{where}"
