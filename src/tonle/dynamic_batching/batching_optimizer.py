"""`BatchingOptimizer`: from recorded batches to advice. Every number in it was measured or computed from what was recorded.

Does: summarize batches by strategy, fit what a batch costs, replay the recorded lengths under each strategy. Does not:
change a batcher's settings.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tonle.dynamic_batching.batch import BatchInfo
from tonle.dynamic_batching.batcher import DynamicBatcher
from tonle.dynamic_batching.batching_config import BatchingConfig, BatchingStrategy

NONE_YET = "none yet"
MIN_BATCHES = 10  # of a strategy, before it is compared
MAX_BATCHES = 10_000  # kept; the oldest go first
REPLAYED = 2_000  # items replayed to predict padding
MUCH_WASTE = 0.2  # padding above this share is worth advice
WORTH_IT = 1.05  # a predicted gain below 5 % is not


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch = `fixed_s` + `token_s` × its padded tokens; least squares over what was recorded."""

    fixed_s: float
    token_s: float

    def seconds(self, padded_tokens: int) -> float:
        return self.fixed_s + self.token_s * padded_tokens


class BatchingOptimizer:
    """Record each batch with the time it took, then ask for recommendations. Thread-safe."""

    def __init__(self, config: BatchingConfig | None = None) -> None:
        """`config`: the limits that the replay holds; the defaults unless given."""
        self._config = config or BatchingConfig()
        self._records: deque[tuple[BatchInfo, float]] = deque(maxlen=MAX_BATCHES)
        self._lock = threading.Lock()

    def record(self, batch_info: BatchInfo, seconds: float) -> None:
        """A batch that was computed. Empty ones are left out."""
        if batch_info.size:
            with self._lock:
                self._records.append((batch_info, seconds))

    def get_recommendations(self) -> dict[str, Any]:
        """`best_strategy` (its name, or "none yet"), `suggestions` (sentences) and `evidence` (what they rest on)."""
        with self._lock:
            records = list(self._records)
        measured = {
            strategy.name: _summary(rows)
            for strategy in BatchingStrategy
            if (rows := [row for row in records if row[0].strategy is strategy])
        }
        evidence: dict[str, Any] = {"batches": len(records), "measured": measured}
        enough = {name: row for name, row in measured.items() if row["batches"] >= MIN_BATCHES}
        if not enough:
            missing = f"{len(records)} batches are recorded; {MIN_BATCHES} of one strategy are needed"
            return {"best_strategy": NONE_YET, "suggestions": [missing], "evidence": evidence}
        best = max(enough, key=lambda name: float(enough[name]["tokens_per_s"]))
        suggestions: list[str] = []
        cost = _fit(records)
        predicted = self._predicted(records, cost)
        evidence |= {"cost": None if cost is None else {"fixed_s": cost.fixed_s, "token_s": cost.token_s},
                     "predicted": predicted}  # fmt: skip
        if len(enough) == 1:
            suggestions.append(f"only {best} was measured; record batches of other strategies to compare them")
        suggestions += _advice(best, enough[best], predicted, cost, self._config)
        return {"best_strategy": best, "suggestions": suggestions, "evidence": evidence}

    def _predicted(self, records: list[tuple[BatchInfo, float]], cost: Cost | None) -> dict[str, dict[str, float]]:
        """Padding, and seconds where the cost is known, if the recorded items were batched by each padded strategy."""
        lengths = [length for info, _ in records for length in info.lengths][-REPLAYED:]
        estimate = _Replayed(records)
        predicted = {}
        for strategy in (BatchingStrategy.NAIVE, BatchingStrategy.BUCKETED, BatchingStrategy.MEMORY_AWARE):
            infos = _replay(lengths, strategy, self._config, estimate)
            padded = sum(info.padded_tokens for info in infos)
            row = {"padding_waste": round(1 - sum(lengths) / padded, 4) if padded else 0.0, "batches": len(infos)}
            if cost is not None:
                row["seconds"] = sum(cost.seconds(info.padded_tokens) for info in infos)
            predicted[strategy.name] = row
        return predicted


class _Replayed:
    """MiB by what the recorded batches were estimated at: the replay keeps the memory limit as they did."""

    def __init__(self, records: list[tuple[BatchInfo, float]]) -> None:
        known = [info for info, _ in records if info.estimated_mb is not None and info.padded_tokens]
        self._mb_per_token = max(
            (info.estimated_mb / info.padded_tokens for info in known if info.estimated_mb), default=0.0
        )

    def sequence_mb(self, length: int) -> float:
        return self._mb_per_token * length


def _replay(
    lengths: Sequence[int], strategy: BatchingStrategy, limits: BatchingConfig, estimate: _Replayed
) -> list[BatchInfo]:
    config = BatchingConfig(
        strategy=strategy,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=max(limits.max_total_tokens, max(lengths)),
        bucket_size=limits.bucket_size,
        memory_limit_mb=max(limits.memory_limit_mb, estimate.sequence_mb(max(lengths))),
    )
    batcher = DynamicBatcher(config, estimate)
    batcher.add_items([(None, length) for length in lengths])
    infos = []
    while len(batcher):
        _, info = batcher.get_next_batch()
        infos.append(info)
    return infos


def _summary(rows: list[tuple[BatchInfo, float]]) -> dict[str, float]:
    seconds = sum(row[1] for row in rows)
    items, tokens = sum(info.size for info, _ in rows), sum(info.real_tokens for info, _ in rows)
    padded = sum(info.padded_tokens for info, _ in rows)
    return {
        "batches": len(rows),
        "items": items,
        "mean_batch_size": round(items / len(rows), 2),
        "items_per_s": round(items / seconds, 3) if seconds else 0.0,
        "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "padding_waste": round(1 - tokens / padded, 4) if padded else 0.0,
        "mean_oldest_wait_s": round(sum(info.oldest_wait_s for info, _ in rows) / len(rows), 6),
    }


def _fit(records: list[tuple[BatchInfo, float]]) -> Cost | None:
    """None if the batches are too much alike to tell fixed from growing cost."""
    xs = [float(info.padded_tokens) for info, _ in records]
    ys = [seconds for _, seconds in records]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread < (0.05 * mean_x) ** 2 * len(xs):
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    if slope <= 0:
        return None
    return Cost(max(0.0, mean_y - slope * mean_x), slope)


def _advice(
    best: str, row: dict[str, float], predicted: dict[str, dict[str, float]], cost: Cost | None, config: BatchingConfig
) -> list[str]:
    advice = []
    waste = row["padding_waste"]
    if waste > MUCH_WASTE:
        other = min(predicted, key=lambda name: predicted[name]["padding_waste"])
        less = predicted[other]["padding_waste"]
        if other != best and (1 - less) / (1 - waste) > WORTH_IT:
            advice.append(
                f"{waste:.0%} of the computed tokens is padding; {other} would pad {less:.0%} on the same items"
            )
    if cost is not None and row["mean_batch_size"] < config.max_batch_size / 2:
        tokens = row["items"] and row["tokens_per_s"] / max(row["items_per_s"], 1e-9) / max(1 - waste, 1e-9)
        share = cost.fixed_s / max(cost.seconds(int(tokens * row["mean_batch_size"])), 1e-12)
        if share > MUCH_WASTE:
            advice.append(
                f"batches have {row['mean_batch_size']:g} items of {config.max_batch_size} and {share:.0%} of a batch's time "
                "does not depend on its size: raise batch_timeout_ms so that batches fill"
            )
    if not advice:
        advice.append(f"keep {best}: nothing recorded suggests a change")
    return advice
