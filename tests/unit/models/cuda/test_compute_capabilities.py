"""Every kernel is compiled, down to machine code, for GPUs of each compute capability that we name, and fits into their memory.

Nothing runs: no such GPU is needed. What kernels compute is the other tests' business.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install triton")

ROOT = Path(__file__).parents[4]
SHARED_KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227}  # that one program may have, as NVIDIA documents it
# Each takes minutes to compile for.
CAPABILITIES = [*(pytest.param(each, marks=pytest.mark.long) for each in ("8.0", "8.6", "8.9")), "9.0"]


@pytest.fixture(scope="module", params=CAPABILITIES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `compile_kernels.py` says of a GPU of this compute capability, line by line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.models.cuda.compile_kernels", request.param, "--few"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled(compiled: list[dict[str, Any]]) -> None:
    assert not [line for line in compiled if "error" in line or "refused" in line]
    every = next(line["kernels"] for line in compiled if "kernels" in line)
    found = [line for line in compiled if "kernel" in line]
    left_out = set(every) - {line["kernel"] for line in found}
    if found[0]["capability"] in ([8, 6], [8, 9]):
        left_out -= {"_skinny"}  # cut for more shared memory than these have; cuBLAS takes its place
    if found[0]["capability"] < [8, 9]:
        left_out -= {"_fp8_rows", "_fp8_product"}  # their tensor cores do not take e4m3
    assert not left_out, f"no step of the models in compile_kernels.py launches {left_out}: add a model that does"


def test_kernels_fit_into_shared_memory(compiled: list[dict[str, Any]]) -> None:
    for line in compiled:
        if "shared" in line:
            limit = SHARED_KIB[".".join(map(str, line["capability"]))] * 1024
            assert line["shared"] <= limit, line
