"""The two commands that serve one set of settings with several front ends: the server, and a gateway in front of it.

Does: write them, for a message. Does not: run them, or repeat keys.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from tonle.config.setting import ADAPTERS, Setting

_HIDDEN = {"api_key": "KEY", "admin_key": "KEY", "alert_webhook": "URL"}


def behind_gateway(config: Any, settings: Mapping[str, Setting], of_gateway: Iterable[str]) -> tuple[str, str]:
    """`config` is a `ServeConfig`; `of_gateway` names the settings that are the gateway's."""
    port = config.port or 8000
    words = [*([config.model] if config.model else []), *_adapter_flags(config, settings)]
    own = "".join(f" {shlex.quote(word)}" for word in words)
    flags = [] if config.loopback else [f"--host {config.host}"]
    for name in of_gateway:
        if value := getattr(config, name):
            shown = _HIDDEN.get(name) or (",".join(value) if isinstance(value, tuple) else value)
            flags.append(f"{settings[name].flag} {shown}")
    return (
        f"tonle serve{own} --frontends {config.frontends} --host 127.0.0.1 --port {port} --trust-salt",
        f"tonle gateway --backend http://127.0.0.1:{port} {' '.join(flags)}",
    )


def _adapter_flags(config: Any, settings: Mapping[str, Setting]) -> list[str]:
    """Those that differ from the defaults, as words of a command."""
    words: list[str] = []
    for each in settings.values():
        value = getattr(config, each.field)
        if each.group != ADAPTERS or value == each.default:
            continue
        if each.field == "lora":
            words += [word for name, path in value for word in (each.flag, f"{name}={path}")]
        else:
            words += [each.flag] if value is True else [each.flag, str(value)]
    return words
