"""How a server is started with settings: `tonle serve`, `vllm serve`, or any command with places for values.

Does: make command lines. Does not: run them (`bench/server_process.py`) or choose settings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tonle.bench.server_process import ServerProcess, free_port
from tonle.config.serve import SETTINGS
from tonle.config.setting import AUDIT, INFERENCE, LIMITS, LOGGING, OBSERVE, SECURITY, SERVER, STATE, STORED
from tonle.errors import ConfigError
from tonle.tune.space import BY_NAME, Settings

_PLACE = re.compile(r"\{(\w+)\}")
# Settings of a file that a server under measurement does without: it answers this program alone, on the loopback interface.
_LEFT_OUT = {SECURITY, AUDIT, STATE, LIMITS, LOGGING, SERVER, STORED, INFERENCE, OBSERVE}
_READY_S = 900.0

Progress = Callable[[float, str], None]


class Launcher(Protocol):
    """Starts servers of one kind."""

    def start(self, settings: Settings, log: Path, on_progress: Progress | None = None) -> ServerProcess: ...


@dataclass(frozen=True, slots=True)
class TonleLauncher:
    """`tonle serve` of this package. `config`: what the user's settings file says."""

    model: str | None
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # for the file that the server reads

    def start(self, settings: Settings, log: Path, on_progress: Progress | None = None) -> ServerProcess:
        flags = self.config_flags()
        for name, value in settings.items():
            flags += [SETTINGS[name].flag, str(value)]
        return ServerProcess.tonle(self.model, flags, log=log, ready_s=_READY_S, on_progress=on_progress)

    def config_flags(self) -> list[str]:
        """For the settings of the file, which is written for it."""
        if not (kept := self.measured_config):
            return []
        import yaml

        file = self.folder / "server.yaml"
        file.write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
        return ["--config", str(file)]

    @property
    def measured_config(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.config.items()
            if name in SETTINGS and (SETTINGS[name].group not in _LEFT_OUT or name == "frontends")
        }

    @property
    def left_out(self) -> list[str]:
        """Settings of the file that are not in force while measuring."""
        return [name for name in self.config if name not in self.measured_config and name not in ("deploy", "model")]


@dataclass(frozen=True, slots=True)
class CommandLauncher:
    """Any command. `{port}` and `{max_num_seqs}` in it are places for values; without `{port}`, `--port N` is added at the end.

    `defaults`: values of places when a knob is not set. A knob without a place becomes a flag at the end.
    """

    command: str
    defaults: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)  # by knob; else --name-with-hyphens

    def validate(self) -> None:
        """Raises `ConfigError`."""
        if not shlex.split(self.command):
            raise ConfigError("--command is empty; give the command that starts the server", param="command")
        for place in self.places:
            if place != "port" and place not in self.defaults:
                raise ConfigError(
                    f"--command has a place {{{place}}} without values; add --values {place}=FIRST,SECOND,… (the first is the "
                    "default)",
                    param="command",
                )

    @property
    def places(self) -> list[str]:
        return _PLACE.findall(self.command)

    def words(self, settings: Settings, port: int) -> list[str]:
        """The command line."""
        values = {**self.defaults, **settings, "port": port}
        words = [
            _PLACE.sub(lambda match: str(values.get(match[1], match[0])), word) for word in shlex.split(self.command)
        ]
        if "port" not in self.places:
            words += ["--port", str(port)]
        for name, value in settings.items():
            if name not in self.places:
                words += [self.flags.get(name) or "--" + name.replace("_", "-"), str(value)]
        return words

    def start(self, settings: Settings, log: Path, on_progress: Progress | None = None) -> ServerProcess:
        port = free_port()
        return ServerProcess(self.words(settings, port), port=port, log=log, ready_s=_READY_S, on_progress=on_progress)


def vllm_launcher(command: str) -> CommandLauncher:
    """`vllm serve MODEL …`. Flags that the search sets itself must not be in it."""
    words = shlex.split(command)
    flags = {knob.name: knob.vllm_flag for knob in BY_NAME.values() if knob.vllm_flag is not None}
    for word in words:
        if word.split("=")[0] == "--port":
            raise ConfigError("leave --port out of --command: `tonle tune` chooses a free port", param="command")
    return CommandLauncher(command, flags=flags)


def model_of_command(command: str) -> str | None:
    """The word after `serve`, for titles."""
    words = shlex.split(command)
    after = words[words.index("serve") + 1 :] if "serve" in words else []
    return next((word for word in after[:1] if not word.startswith("-")), None)
