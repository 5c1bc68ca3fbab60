"""Find out, before measuring, which of a server's models answers this kind of requests.

Does: ask /v1/models, and send one request that is not counted. Does not: measure anything.
"""

from __future__ import annotations

from tonle.bench.drive import send_job
from tonle.bench.kinds.settings import PATHS
from tonle.bench.kinds.workload import KindWorkload, kind_workload
from tonle.bench.options import BenchOptions
from tonle.bench.target import NO_MODELS, list_models
from tonle.edge.client import HttpClient
from tonle.errors import ConfigError

MAX_TRIED = 16  # models that are asked


async def explore_kind(client: HttpClient, options: BenchOptions, notes: list[str]) -> tuple[str, KindWorkload]:
    """The model, and what is sent to it. Raises `ConfigError`, saying what to do, if none answers."""
    kind_workload(options, "default")  # first: its errors need no server
    names = await list_models(client)
    if options.model is not None:
        tried = [options.model]
    elif names:
        tried = names[:MAX_TRIED]
    else:
        tried = ["default"]
        notes.append(NO_MODELS)
    failures = []
    for model in tried:
        workload = kind_workload(options, model)
        job = next(workload.jobs(0, "probe"))
        sample = await send_job(client, job, timeout_s=options.timeout_s)
        if sample.failure is None:
            if len(names) > 1 and options.model is None:
                notes.append(f"the server lists {len(names)} models: {model} is measured (--model chooses another)")
            return model, workload
        failures.append(f"{model}: {sample.failure}")
    raise ConfigError(
        f"{client.address} answers no POST {PATHS[options.kind]} ({'; '.join(failures[:3])}). "
        "Name a model of this kind with --model",
        param="model",
    )
