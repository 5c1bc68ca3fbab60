"""The gateway in front of a real vLLM and a replica, and our middleware inside vLLM. Takes minutes and gigabytes.

Runs only where PEER_VLLM_PYTHON names the interpreter of an environment with vLLM for CPU (benchmarks/README.md):

    PEER_VLLM_PYTHON=~/peers/vllm/bin/python python -m pytest tests/gateway/test_real_vllm.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("PEER_VLLM_PYTHON")


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PYTHON, reason="PEER_VLLM_PYTHON is not set")
@pytest.mark.parametrize("victim", ["first", "second"])
def test_vllm_and_a_replica_and_the_death_of_one(tmp_path: Path, victim: str) -> None:
    from benchmarks.two_backends import run

    assert PYTHON is not None
    assert run(tmp_path, Path(PYTHON).expanduser().absolute(), victim) == []
