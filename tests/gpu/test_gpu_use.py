"""On a GPU: `get_stats` and the metrics tell how busy it is, of the very device that computes. Numbers to look at with -s."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import pynvml
from transformers import LlamaConfig, LlamaForCausalLM

from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.machine import gpu_uuid
from tonle.telemetry.gpu import GpuMonitor
from tonle.telemetry.metrics import Metrics

pytestmark = pytest.mark.gpu
LONG = GenerationConfig(max_length=600, early_stopping=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    shape = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to(torch.bfloat16).cuda()
    config = EngineConfig(max_batch_size=64, max_sequence_length=1024, profile_performance=True)
    with InferenceEngine(model, None, config) as made:
        yield made


def under_load(engine: InferenceEngine) -> Iterator[dict[str, Any]]:
    """Readings while 64 requests run, at most one per second."""
    requests = [engine.submit_request([5, 6, 7 + number], LONG) for number in range(64)]
    for _ in range(200):
        yield engine.get_stats()["gpu"]
        if all(engine._requests[request_id].done() for request_id in requests):
            requests = [engine.submit_request([5, 6, 7 + number], LONG) for number in range(64)]
        time.sleep(0.05)
    for request_id in requests:
        engine.cancel(request_id)


def test_the_gpu_is_busy_while_requests_run(engine: InferenceEngine) -> None:
    readings = list(under_load(engine))
    free, total = torch.cuda.mem_get_info()
    for reading in readings:
        assert reading["memory_total"] == pytest.approx(total, rel=0.02)
        assert torch.cuda.memory_reserved() <= reading["memory_used"] <= total
    shares = sorted({reading["utilization"] for reading in readings})
    print(f"\nshare of time a kernel runs: {shares}; {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB")
    assert 0.2 < shares[-1] <= 1
    profile = engine.get_stats()["profile"]
    print({part: f"{each['ms_per_step']:.3f} ms, {each['share']:.0%}" for part, each in profile.items()})
    assert {"build", "forward", "sample", "wait", "rest"} == set(profile)


def test_the_metrics_have_it(engine: InferenceEngine) -> None:
    assert engine._front is not None
    metrics = Metrics("m", engine._front)
    for _ in range(100):  # a scrape does not wait for the first, slow, answer of the driver
        text = metrics.render("")[0].decode()
        if "tonle:gpu_utilization{" in text:
            break
        time.sleep(0.05)
    for name in ("gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"):
        assert f'tonle:{name}{{model_name="m"}} ' in text


def test_the_uuid_is_that_of_the_device() -> None:
    """By its place on the bus, which CUDA and the driver tell independently of each other."""
    pynvml.nvmlInit()
    for number in range(torch.cuda.device_count()):
        place = torch.cuda.get_device_properties(number)
        bus_id = f"{place.pci_domain_id:08x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
        known = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
        assert known == f"GPU-{gpu_uuid(torch.device('cuda', number))}"


def test_a_device_is_found_whatever_cuda_calls_it() -> None:
    """CUDA's device 0 is the one that CUDA_VISIBLE_DEVICES names, the driver's is not."""
    last = gpu_uuid(torch.device("cuda", torch.cuda.device_count() - 1))
    program = "import torch; from tonle.engine.machine import gpu_uuid; print(gpu_uuid(torch.device('cuda:0')))"
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": f"GPU-{last}"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == last
    assert GpuMonitor().read(last) is not None


def test_how_long_the_driver_takes() -> None:
    uuid = gpu_uuid(torch.device("cuda", 0))
    took = []
    for clock in (lambda: 0.0, *(lambda: 1e6 + time.monotonic() * 1e3 for _ in range(5))):
        monitor = GpuMonitor(clock)
        for _ in range(2):  # with and without loading the library
            began = time.perf_counter()
            monitor.read(uuid)
            took.append((time.perf_counter() - began) * 1e3)
    print(f"\nms per reading: {', '.join(f'{ms:.2f}' for ms in took)}")


def test_optimize_memory_returns_memory_to_the_driver(engine: InferenceEngine) -> None:
    spare = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del spare
    before = torch.cuda.memory_reserved()
    engine.optimize_memory()
    assert torch.cuda.memory_reserved() <= before - 2**28
