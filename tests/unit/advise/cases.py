"""Questions that several tests ask."""

from __future__ import annotations

from typing import Any

from tonle.advise.choose import Question
from tonle.advise.gpus import find_data_sheet
from tonle.advise.precision import KV_PRECISIONS, PRECISIONS
from tonle.advise.read_model import find_model
from tonle.advise.roofline import RooflineTimes
from tonle.advise.workload import Workload
from tonle.bench import Span
from tonle.bench.slo import Slo

LONG_MIX = (Span(1000, 20_000), Span(100, 2000))
CHAT = (Span(32, 400), Span(128, 512))
QUICK = (Span(32, 400), Span(16, 48))  # to simulate


def times(
    model: str = "llama-3.1-70b", gpu: str = "H100", precision: str = "bf16", gpus: int = 1, kv: str = "bf16"
) -> RooflineTimes:
    return RooflineTimes(
        shape=find_model(model),
        gpu=find_data_sheet(gpu),
        precision=PRECISIONS[precision],
        kv=KV_PRECISIONS[kv],
        gpus=gpus,
    )


def question(
    model: str = "llama-3.1-70b",
    gpu: str = "H100",
    lengths: tuple[Span, Span] = LONG_MIX,
    *,
    slo: tuple[str, ...] = (),
    users: int | None = None,
    rate: float | None = None,
    shared_prefix: int = 0,
    **others: Any,
) -> Question:
    return Question(
        shape=find_model(model),
        gpu=find_data_sheet(gpu),
        workload=Workload.of_spans(*lengths, users=users, rate=rate, shared_prefix=shared_prefix),
        slo=Slo.parse(slo),
        **others,
    )
