"""Settings of a pool, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.errors import ConfigError
from tonle.workers import worker_process
from tonle.workers.pool_config import PoolConfig
from tonle.workers.worker_process import device_of


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"kind": "nothing"}, "kind"),
        ({"name": "a/b"}, "name"),
        ({"device": "cuda:0,,cuda:1"}, "device"),
        ({"instances": 0}, "instances"),
        ({"min_instances": -1}, "min_instances"),
        ({"max_batch": True}, "max_batch"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_wait_ms": -1}, "max_wait_ms"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"idle_unload_s": float("inf")}, "idle_unload_s"),
        ({"strategy": "continuous"}, "strategy"),
        ({"max_memory_mb": 1.5}, "max_memory_mb"),
    ],
)
def test_wrong_ones_are_refused_by_name(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PoolConfig(**{"kind": "embeddings", **settings}).validate()
    assert refused.value.param == param and param in refused.value.message.replace(" of worker", "")


def test_names_and_numbers() -> None:
    config = PoolConfig(kind="package.module:Shout", device="cuda:0, cuda:1", instances=2, min_instances=9)
    config.validate()
    assert (config.pool_name, config.model_name, config.least) == ("shout", "shout", 4)
    assert config.devices == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert PoolConfig(kind="asr", model="folder", min_instances=0).model_name == "folder"
    assert PoolConfig(kind="asr", model="folder", served_name="ears").model_name == "ears"
    assert (PoolConfig(kind="asr", min_instances=0).least, PoolConfig(kind="asr").least) == (0, 1)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker_process, "num_cores", lambda: 8)
    assert device_of("cpu", 3) == ("cpu", {"OMP_NUM_THREADS": "2"})
    assert device_of("cpu", 100) == ("cpu", {"OMP_NUM_THREADS": "1"})
    assert device_of("cuda:1", 3) == ("cuda:1", {})
    assert device_of("MIG-1-2", 1) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-1-2"})
    assert device_of("GPU-1-2", 1) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1-2"})
