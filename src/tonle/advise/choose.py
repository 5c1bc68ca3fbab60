"""From a model, a GPU, a workload and an SLO to a `Sizing`: which option, how many replicas, which length classes.

Does: compare options by GPU seconds, with a price on lost accuracy. Does not: simulate (`check.py`) or write sentences
(`explain_model.py`, `explain_limits.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tonle.advise.gpus import DataSheet
from tonle.advise.option import Option, Settings, build_option
from tonle.advise.precision import KV_PRECISIONS, PRECISIONS
from tonle.advise.roofline import RooflineTimes
from tonle.advise.shape import ModelShape
from tonle.advise.workload import LONG_PROMPT, Workload
from tonle.bench.slo import Slo
from tonle.errors import ConfigError

GPU_COUNTS = (1, 2, 4, 8)  # of one replica
HEADROOM = 0.8  # share of its throughput that a replica is planned for: arrivals come in bunches
# What a lower precision must save, in GPU seconds, to be worth its risk of worse answers.
ACCURACY_PRICE = {"bf16": 0.0, "fp8": 0.1, "int8": 0.1, "int4": 0.25}
PARALLEL_PRICE = 0.25  # what more GPUs per replica than needed must save: replicas fail alone and share nothing
_CONTEXT_ROUND = 1024

Engine = Literal["auto", "tonle", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. `context_length` 0: the workload's longest request, rounded up."""

    shape: ModelShape
    gpu: DataSheet
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    precisions: tuple[str, ...] = ()  # allowed ones; (): all
    gpu_counts: tuple[int, ...] = GPU_COUNTS
    kv: str = "auto"  # bf16 unless only fp8 fits
    engine: Engine = "auto"  # what may serve it; auto: Tonle if it can, else vLLM
    price_per_hour: float | None = None  # of one GPU
    length_threshold: int = LONG_PROMPT

    def validate(self) -> None:
        """Raises `ConfigError`."""
        if unknown := [name for name in self.precisions if name not in PRECISIONS]:
            raise ConfigError(
                f"--precision {unknown[0]!r} is not known; it must be one of {', '.join(PRECISIONS)}", param="precision"
            )
        if self.kv not in ("auto", *KV_PRECISIONS):
            raise ConfigError(f"--kv-dtype must be auto, bf16 or fp8, not {self.kv!r}", param="kv_dtype")
        if self.engine not in ("auto", "tonle", "vllm"):
            raise ConfigError(f"--engine must be auto, tonle or vllm, not {self.engine!r}", param="engine")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ConfigError(f"--price must be more than 0 per hour, not {self.price_per_hour:g}", param="price")
        if not self.gpu_counts or any(count not in GPU_COUNTS for count in self.gpu_counts):
            raise ConfigError("--gpus-per-replica must be 1, 2, 4 or 8, or a list of these", param="gpus_per_replica")
        if self.length_threshold < 1:
            raise ConfigError("--length-threshold must be at least 1 token", param="length_threshold")
        if self.workload.longest > self.shape.context_length:
            raise ConfigError(
                f"requests of up to {self.workload.longest:,} tokens do not fit the context of {self.shape.name}, "
                f"{self.shape.context_length:,} tokens; choose shorter lengths or another model",
                param="input_tokens",
            )

    @property
    def context_length(self) -> int:
        rounded = math.ceil(self.workload.longest / _CONTEXT_ROUND) * _CONTEXT_ROUND
        return min(self.shape.context_length, rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Replicas that are alike: all of them, or those of one length class."""

    length: Literal["any", "short", "long"]
    workload: Workload
    option: Option
    replicas: int

    @property
    def settings(self) -> Settings:
        assert self.option.settings is not None  # a group's option fits
        return self.option.settings

    @property
    def gpus(self) -> int:
        return self.replicas * self.option.times.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    groups: tuple[Group, ...]

    @property
    def option(self) -> Option:
        return self.groups[0].option

    @property
    def replicas(self) -> int:
        return sum(group.replicas for group in self.groups)

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def split(self) -> bool:
        return len(self.groups) > 1


def precision_names(question: Question) -> tuple[str, ...]:
    """Those asked for; else that of the files if they are quantized, or all that the GPU computes with."""
    if question.precisions:
        return question.precisions
    stored = question.shape.stored_as
    if stored in PRECISIONS:
        return (str(stored),)
    return ("bf16", "fp8" if question.gpu.has_fp8 else "int8", "int4")


def all_options(question: Question) -> list[Option]:
    """By precision, then by GPUs per replica."""
    counts = [gpus for gpus in question.gpu_counts if gpus <= question.gpu.most_gpus]
    return [_option(question, name, gpus) for name in precision_names(question) for gpus in counts]


def _option(question: Question, precision: str, gpus: int) -> Option:
    def build(kv: str) -> Option:
        times = RooflineTimes(
            shape=question.shape, gpu=question.gpu, precision=PRECISIONS[precision], kv=KV_PRECISIONS[kv], gpus=gpus
        )
        return build_option(times, question.workload, question.slo, question.context_length)

    if question.kv != "auto":
        return build(question.kv)
    plain = build("bf16")
    if plain.fits or not question.gpu.has_fp8:
        return plain
    packed = build("fp8")
    return packed if packed.fits else plain


def allowed(option: Option, engine: Engine) -> bool:
    return engine != "tonle" or not option.not_served


def choose(question: Question, options: list[Option]) -> Option | None:
    """None: nothing that may be used fits. Options that miss the SLO even at their floors come last."""
    usable = [option for option in options if option.fits and allowed(option, question.engine)]
    usable = [option for option in usable if option.holds] or usable
    if question.engine == "auto":
        usable = [option for option in usable if not option.not_served] or usable
    best: Option | None = None
    for name in precision_names(question):
        own = _smallest([option for option in usable if option.times.precision.name == name], question)
        if own is not None and (best is None or _price(own, question) < _price(best, question)):
            best = own
    return best


def _smallest(options: list[Option], question: Question) -> Option | None:
    """Of one precision: the fewest GPUs per replica, unless more save a quarter."""
    best: Option | None = None
    for option in options:
        if best is None or cost(option, question) < (1 - PARALLEL_PRICE) * cost(best, question):
            best = option
    return best


def cost(option: Option, question: Question) -> float:
    """GPUs for the load, in fractions beyond the first replica, so that rounding up decides nothing; without a load, GPU seconds
    per request."""
    workload, settings = question.workload, option.settings
    assert settings is not None
    if workload.rate is not None:
        return option.times.gpus * max(1.0, workload.rate * option.request_s / HEADROOM)
    if workload.users is not None:
        return option.times.gpus * max(1.0, workload.users / settings.max_num_seqs)
    return option.gpu_s


def _price(option: Option, question: Question) -> float:
    return cost(option, question) / (1 - ACCURACY_PRICE[option.times.precision.name])


def replicas_for(option: Option, workload: Workload) -> int:
    """By the rule of thumb; the simulation corrects it."""
    assert option.settings is not None
    if workload.rate is not None:
        return max(1, math.ceil(workload.rate * option.request_s / HEADROOM))
    if workload.users is not None:
        return max(1, math.ceil(workload.users / option.settings.max_num_seqs))
    return 1


def size_together(question: Question, option: Option) -> Sizing:
    """All replicas alike."""
    group = Group(
        length="any", workload=question.workload, option=option, replicas=replicas_for(option, question.workload)
    )
    return Sizing(groups=(group,))


def size_by_length(question: Question, option: Option) -> Sizing | None:
    """A group for short prompts and one for long ones. None: the workload has not both kinds."""
    classes = question.workload.classes(question.length_threshold)
    if classes is None:
        return None
    groups = []
    for length, workload in zip(("short", "long"), classes, strict=True):
        own = build_option(option.times, workload, question.slo, question.context_length)
        if not own.fits or own.settings is None:
            return None
        groups.append(
            Group(
                length="short" if length == "short" else "long",
                workload=workload,
                option=own,
                replicas=replicas_for(own, workload),
            )
        )
    return Sizing(groups=tuple(groups))
