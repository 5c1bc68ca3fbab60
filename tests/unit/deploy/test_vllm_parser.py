"""What vLLM's own argument parser says of the command lines that are rendered for it. Takes half a minute.

Runs only where PEER_VLLM_PYTHON names the interpreter of an environment with vLLM for CPU (benchmarks/README.md).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest

from tests.unit.deploy.matrix import CASES
from tests.unit.deploy.test_documents import containers

PYTHON = os.environ.get("PEER_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PEER_VLLM_PYTHON is not set")
# Reads command lines from stdin, and prints what becomes of each: its settings, or the parser's complaint.
PROGRAM = """
import contextlib, io, json, sys
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

for args in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = make_arg_parser(FlexibleArgumentParser()).parse_args(args)
        print("RESULT", json.dumps({name: repr(value) for name, value in vars(found).items()}))
    except SystemExit:
        print("RESULT", json.dumps({"error": said.getvalue()[-400:]}))
"""


def command_lines() -> list[list[str]]:
    """Of every case with vLLM, without repetitions."""
    found = {}
    for case in CASES:
        if case.workload.is_ours:
            continue
        for document in case.documents:
            for container in containers(document):
                args = container.get("args", [])
                if container.get("command") == ["vllm", "serve"]:
                    found[json.dumps(args)] = args
                elif container["name"] == "main":  # KServe's shell reads these once more
                    found[json.dumps(args)] = ["/mnt/models", *shlex.split(" ".join(args))]
    return list(found.values())


def test_vllm_reads_them_as_they_are_meant() -> None:
    lines = command_lines()
    assert len(lines) > 5
    broken = [[*lines[0], "--no-such-flag"], [*lines[0], "--kv-cache-dtype=fp7"], [*lines[0], "--max-model-len=long"]]
    done = subprocess.run(
        [str(PYTHON), "-c", PROGRAM], input=json.dumps([*lines, *broken]), capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    found = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(lines) + len(broken), done.stderr[-2000:]
    for args, settings in zip(lines, found, strict=False):
        assert "error" not in settings, f"{args}: {settings['error']}"
        assert settings["model_tag"] == repr(args[0])
        wanted = dict(arg[2:].split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
        if wanted["max-model-len"] == "auto":
            assert settings["max_model_len"] == "-1"
        assert settings["shutdown_timeout"] == wanted["shutdown-timeout"]
        if "--served-model-name" in args:
            assert settings["served_model_name"].count(",") >= 1
    assert all("error" in settings for settings in found[len(lines) :])
