"""`Profile`: a server and how long its steps take. A JSON file that `tonle profile` writes and simulations read.

Does: load, save, list those that the package ships (`profiles/`). Does not: measure (`run_profile.py`) or simulate.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tonle.config.engine import EngineConfig
from tonle.config.types import wrong_type
from tonle.engine.schedule.limits import SchedulerLimits
from tonle.errors import ConfigError
from tonle.simulate.fitted_times import FittedTimes

_SHIPPED = files("tonle.simulate") / "profiles"
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server that was measured. Its limits are those in force then."""

    model: str
    device: str  # "cpu" | "cuda"
    device_name: str
    dtype: str
    block_size: _AtLeastOne
    num_blocks: _AtLeastOne
    context_length: _AtLeastOne
    max_num_seqs: _AtLeastOne
    max_num_batched_tokens: _AtLeastOne
    long_prefill_tokens: _AtLeastOne
    settings: dict[str, Any]  # of the engine, those that differ from the defaults


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How well the model of step times predicts steps that it was not fitted to."""

    kind: str  # of steps
    steps: int
    seconds: float  # that they took
    median_error: float  # |expected / measured - 1|
    p90_error: float
    total_error: float  # of the sum of all of them, scatter included; below 0: expected too short


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["tonle.profile/1"] = "tonle.profile/1"
    made_at: str  # UTC, ISO 8601
    tonle: str  # version
    server: ServerFacts
    times: FittedTimes
    fits: list[Fit] = []
    notes: list[str] = []  # what its reader should know
    left_out: float = 0.0  # share of the steps' time: spells in which others slowed the machine down (`spells.py`)

    def limits(self, **changes: int) -> SchedulerLimits:
        """Of the server's scheduler. `changes`: by field, such as max_num_seqs=64. Without a threshold of its own, the most of
        one prompt in a step keeps its share of the step, as in a server with that `max_num_batched_tokens`."""
        server, engine = self.server, self.engine
        tokens = changes.get("max_num_batched_tokens", server.max_num_batched_tokens)
        threshold = server.long_prefill_tokens
        if not engine.long_prefill_token_threshold:
            threshold = max(1, threshold * tokens // server.max_num_batched_tokens)
        own: dict[str, Any] = {
            "max_num_seqs": server.max_num_seqs,
            "max_num_batched_tokens": tokens,
            "context_length": server.context_length,
            "block_size": server.block_size,
            "long_prefill_tokens": threshold,
            "ageing_s": engine.priority_ageing_s,
            "prefix_caching": engine.reuses_prefixes,
            "continuous": engine.enable_continuous_batching,
            "batch_timeout_s": engine.batch_timeout_ms / 1e3,
            "min_forced": 1 + self.times.lag,
        }
        return SchedulerLimits(**own | changes)

    @property
    def engine(self) -> EngineConfig:
        """The server's settings, as far as this version knows them."""
        known = EngineConfig.names()
        return EngineConfig(**{name: value for name, value in self.server.settings.items() if name in known})


def shipped_profiles() -> list[str]:
    """Names that `load_profile` takes beside paths."""
    if not _SHIPPED.is_dir():
        return []
    return sorted(each.name.removesuffix(".json") for each in _SHIPPED.iterdir() if each.name.endswith(".json"))


def load_profile(name_or_path: str) -> Profile:
    """One that the package ships, by its name, or a file. Raises `ConfigError`."""
    if name_or_path in shipped_profiles():
        data = (_SHIPPED / f"{name_or_path}.json").read_bytes()
    else:
        try:
            data = Path(name_or_path).read_bytes()
        except OSError as error:
            known = ", ".join(shipped_profiles())
            raise ConfigError(
                f"cannot read the profile {name_or_path}: {error.strerror}. Make one with `tonle profile -o FILE`, or use one "
                f"of those that come with Tonle: {known}",
                param="profile",
            ) from None
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path} is not a profile of steps ({error})", param="profile") from None
    if (wrong := wrong_type(profile.engine)) is not None:
        raise ConfigError(f"{name_or_path} is not a profile of steps (server.settings: {wrong[1]})", param="profile")
    return profile


def save_profile(profile: Profile, path: Path) -> None:
    """Raises `ConfigError`."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output") from None
