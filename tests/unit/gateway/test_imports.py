"""A gateway runs where no torch is."""

from __future__ import annotations

import subprocess
import sys


def test_a_gateway_never_loads_torch() -> None:
    heavy = ("torch", "transformers", "tonle.engine", "tonle.models", "tonle.replica")
    code = f"import sys, tonle.gateway.gateway, tonle.cli.gateway; sys.exit(any(n in sys.modules for n in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
