"""`TuneOptions`: what to tune, for what, and how long it may take.

Does: hold and check. Does not: act on them (`tuning.py`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonle.bench import BenchOptions
from tonle.bench.numbers import clock_text
from tonle.bench.report import describe_settings
from tonle.errors import ConfigError
from tonle.tune.objective import Goal
from tonle.tune.space import ServerKind, checked_values
from tonle.tune.state import Inputs

LEAST_BUDGET_S = 120.0
# Settings of a benchmark that do not say what is sent.
_NOT_WORKLOAD = {"url", "model", "verify_tls", "keep_requests", "seed", "concurrency", "rates", "slo", "timeout_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    bench: BenchOptions  # what to send: one level
    goal: Goal
    out: Path
    budget_s: float = 600.0
    model: str | None = None
    server: ServerKind = "tonle"
    command: str | None = None  # vLLM and others: what starts the server
    profile: str | None = None  # a file or a name; None: made first
    allow: tuple[str, ...] = ()
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    config: Path | None = None  # settings that stay as they are
    device: str | None = None  # vLLM and others: "cpu" | "cuda"; None: a GPU if there is one
    seed: int = 0

    def validate(self) -> None:
        """Raises `ConfigError`."""
        self.goal.validate()
        self.bench.validate()
        if len(self.bench.levels) != 1:
            labels = ", ".join(load.label for load in self.bench.levels)
            raise ConfigError(f"tune for one load, not several ({labels})", param="concurrency")
        if self.budget_s < LEAST_BUDGET_S:
            raise ConfigError(
                f"--budget {clock_text(self.budget_s)} is too short: two minutes are the least, four where the server is "
                "profiled first, and ten are usual",
                param="budget",
            )
        self._check_server()
        checked_values(self.server, self.values, self.allow)

    def _check_server(self) -> None:
        if self.server == "tonle":
            if self.command is not None:
                raise ConfigError(
                    "--command is for other servers: add --server vllm (or other), or give the model alone for Tonle",
                    param="command",
                )
            if self.device is not None:
                raise ConfigError("--device is for other servers; Tonle's own finds its device itself", param="device")
            return
        if self.command is None:
            example = "vllm serve MODEL" if self.server == "vllm" else "llama-server -m FILE --port {port} -np {slots}"
            raise ConfigError(f'--server {self.server} needs --command "{example} …"', param="command")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"--command cannot be read as a command line: {error}", param="command") from None
        for name, value in (("--profile", self.profile), ("--config", self.config)):
            if value is not None:
                raise ConfigError(
                    f"{name} is for Tonle's own server; with --server {self.server} leave it out", param="server"
                )
        if self.model is not None:
            raise ConfigError(
                f"with --server {self.server} the model is part of --command: leave it out here", param="model"
            )

    def inputs(self, config: dict[str, Any]) -> Inputs:
        """What makes two tunings the same. `config`: settings of the file that are in force while measuring."""
        settings = describe_settings(self.bench)
        return Inputs(
            model=self.model,
            server=self.server,
            command=self.command,
            workload={name: _plain(value) for name, value in settings.items() if name not in _NOT_WORKLOAD},
            load=self.bench.levels[0].label,
            slo=str(self.goal.slo),
            maximize=self.goal.maximize,
            allow=sorted(self.allow),
            values={name: list(values) for name, values in self.values.items()},
            config={name: _plain(value) for name, value in config.items()},
            profile=self.profile,
            seed=self.seed,
        )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | dict) or value is None else str(value)
