"""`Workload`: the requests that a sizing is for: lengths of prompts and answers, and how many come.

Does: draw lengths from ranges, the statistics that capacity follows from, and the classes of long and short prompts. Does not:
make prompts or moments (`check.py` makes a trace of it).
"""

from __future__ import annotations

import math
import random
from functools import cached_property

from tonle.bench import Span
from tonle.config.gateway import GatewayConfig
from tonle.errors import ConfigError
from tonle.telemetry.percentile import percentile

_DRAWN = 2000  # requests that statistics are taken of
LONG_PROMPT = GatewayConfig().length_threshold  # tokens
_MIN_CLASS = 0.05  # share of requests, and of prompt tokens, that makes a class of its own worth having


def preset_lengths(name: str) -> tuple[Span, Span, int]:
    """Prompts, answers and shared prefix of a named workload of `tonle bench`. Raises `ConfigError`."""
    from tonle.bench.datasets.presets import PRESETS

    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"there is no preset {name!r}; presets: {', '.join(PRESETS)}", param="preset")
    if preset.turns is not None:
        raise ConfigError(
            f"the preset {name} has conversations, whose prompts grow from turn to turn: give --input-tokens and "
            f"--output-tokens of "
            "an average turn instead",
            param="preset",
        )
    if preset.prefixes > 1:  # not all prompts share one: counted as if none did
        longer = Span(
            preset.input_tokens.low + preset.shared_prefix_tokens,
            preset.input_tokens.high + preset.shared_prefix_tokens,
        )
        return longer, preset.output_tokens, 0
    return preset.input_tokens, preset.output_tokens, preset.shared_prefix_tokens


class Workload:
    """`users` who each wait for their answer, or `rate` requests per second; neither: as many as one replica holds."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        label: str,
        users: int | None = None,
        rate: float | None = None,
        shared_prefix: int = 0,
    ) -> None:
        if users is not None and rate is not None:
            raise ConfigError("give --concurrency or --rate, not both", param="rate")
        if users is not None and users < 1:
            raise ConfigError(f"--concurrency must be at least 1, not {users}", param="concurrency")
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--rate must be more than 0 requests per second, not {rate:g}", param="rate")
        if shared_prefix < 0:
            raise ConfigError(
                f"--shared-prefix-tokens must be at least 0, not {shared_prefix}", param="shared_prefix_tokens"
            )
        if not lengths or any(prompt < 1 or answer < 1 for prompt, answer in lengths):
            raise ConfigError("prompts and answers have at least one token each", param="input_tokens")
        self.lengths = [(prompt + shared_prefix, answer) for prompt, answer in lengths]
        self.label = label
        self.users = users
        self.rate = rate
        self.shared_prefix = shared_prefix

    @classmethod
    def of_spans(
        cls,
        prompts: Span,
        answers: Span,
        *,
        users: int | None = None,
        rate: float | None = None,
        shared_prefix: int = 0,
    ) -> Workload:
        for name, span in (("input_tokens", prompts), ("output_tokens", answers)):
            if span.low < 1 or span.high < span.low:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be a number or a range of at least 1 token, not {span}",
                    param=name,
                )
        rng = random.Random(0)
        lengths = [(prompts.draw(rng), answers.draw(rng)) for _ in range(_DRAWN)]
        return cls(lengths, label=f"{prompts} in, {answers} out", users=users, rate=rate, shared_prefix=shared_prefix)

    # -- statistics

    @cached_property
    def prompts(self) -> list[int]:
        return sorted(prompt for prompt, _ in self.lengths)

    @cached_property
    def answers(self) -> list[int]:
        return sorted(answer for _, answer in self.lengths)

    @cached_property
    def totals(self) -> list[int]:
        return sorted(prompt + answer for prompt, answer in self.lengths)

    @cached_property
    def mean_prompt(self) -> float:
        return math.fsum(self.prompts) / len(self.lengths)

    @cached_property
    def mean_answer(self) -> float:
        return math.fsum(self.answers) / len(self.lengths)

    @cached_property
    def longest(self) -> int:
        return self.totals[-1]

    def prompt_at(self, percent: float) -> int:
        return math.ceil(percentile(self.prompts, percent))

    def total_at(self, percent: float) -> int:
        return math.ceil(percentile(self.totals, percent))

    @cached_property
    def held_mean(self) -> float:
        """Tokens that a running request holds on average: its prompt and half of its answer, and requests with long answers
        are met more often. A prefix that all share is held once and not counted."""
        held = math.fsum(answer * (prompt + answer / 2) for prompt, answer in self.lengths) / math.fsum(self.answers)
        return held - self.shared_prefix

    @cached_property
    def held_spread(self) -> float:
        """Standard deviation of the same over running requests."""
        total = math.fsum(self.answers)
        squares = math.fsum(
            answer * (prompt * prompt + prompt * answer + answer * answer / 3) for prompt, answer in self.lengths
        )
        return math.sqrt(max(0.0, squares / total - (self.held_mean + self.shared_prefix) ** 2))

    # -- classes of lengths

    def classes(self, threshold: int = LONG_PROMPT) -> tuple[Workload, Workload] | None:
        """Requests with prompts below and from `threshold`, each with its share of the load. None: there are not two kinds."""
        short = [pair for pair in self.lengths if pair[0] < threshold]
        long = [pair for pair in self.lengths if pair[0] >= threshold]
        if min(len(short), len(long)) < _MIN_CLASS * len(self.lengths):
            return None
        return self._part(short, f"prompts below {threshold:,} tokens"), self._part(
            long, f"prompts from {threshold:,} tokens"
        )

    def _part(self, lengths: list[tuple[int, int]], label: str) -> Workload:
        share = len(lengths) / len(self.lengths)
        own = [(prompt - self.shared_prefix, answer) for prompt, answer in lengths]
        rate = None if self.rate is None else self.rate * share
        users = None if self.users is None else max(1, round(self.users * share))
        return Workload(own, label=label, rate=rate, users=users, shared_prefix=self.shared_prefix)
