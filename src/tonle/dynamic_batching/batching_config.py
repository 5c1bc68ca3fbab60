"""`BatchingConfig`: the settings of a `DynamicBatcher`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tonle.config.setting_names import named_settings
from tonle.errors import ConfigError


class BatchingStrategy(enum.Enum):
    """Which waiting items make the next batch."""

    NAIVE = "naive"  # in order of arrival, whatever their lengths
    BUCKETED = "bucketed"  # items of one bucket: lengths that differ by less than `bucket_size`
    MEMORY_AWARE = "memory_aware"  # those nearest in length to the most urgent item, as many as memory holds
    CONTINUOUS = "continuous"  # unpadded; items join and leave a running batch between steps


@named_settings
@dataclass(slots=True, kw_only=True)
class BatchingConfig:
    """A `DynamicBatcher` copies and checks it."""

    strategy: BatchingStrategy = BatchingStrategy.MEMORY_AWARE
    max_batch_size: int = 32  # items
    max_total_tokens: int = 32_768  # of a batch, padding included
    bucket_size: int = 128  # tokens; BUCKETED only
    memory_limit_mb: float = 4096.0  # MiB, by the memory estimator; without one it has no effect
    batch_timeout_ms: float = 0.0  # how long the first item may wait for its batch to fill; 0 = not at all
    priority_ageing_s: float = 5.0  # an item overtakes the next higher priority after waiting this much longer
    enable_continuous_batching: bool = True  # False: a batch stays as it was formed, and `Batch.join` adds nothing

    def validate(self) -> None:
        """Raises `ConfigError`."""
        try:
            self.strategy = BatchingStrategy(self.strategy)
        except ValueError:
            names = ", ".join(strategy.name for strategy in BatchingStrategy)
            raise ConfigError(f"strategy must be one of {names}, not {self.strategy!r}", param="strategy") from None
        for name in ("max_batch_size", "max_total_tokens", "bucket_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}", param=name)
        for name in ("memory_limit_mb", "batch_timeout_ms", "priority_ageing_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ConfigError(f"{name} must be a number of at least 0, not {value!r}", param=name)
        if self.strategy is BatchingStrategy.CONTINUOUS and not self.enable_continuous_batching:
            raise ConfigError(
                "strategy CONTINUOUS needs enable_continuous_batching=True; for batches that stay as they were formed "
                "choose NAIVE, BUCKETED or MEMORY_AWARE",
                param="enable_continuous_batching",
            )
