"""`tonle serve`, whole: flags in, a ready server, an answer, a clean end."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.unit.cli.terminal import COMMAND, DEADLINE_S, environment, tonle
from tonle.cli.banner import ServerInfo, banner, weights
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind
from tonle.engine.messages import ModelCard

# The command, and at its end a word on what it imported.
OBSERVED = """
import atexit, sys
from tonle.cli import main
atexit.register(lambda: print("imported torch:", "torch" in sys.modules, flush=True))
main()
"""
CARD = ModelCard(
    architecture="LlamaForCausalLM", context_length=512, vocab_size=9, eos_ids=[], device="cpu", dtype="float32",
    block_size=16, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=64, load_s=1.0,
    kv_dtype="int8",
)  # fmt: skip


@contextmanager
def server(
    *args: str, command: list[str] = COMMAND, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | (variables or {}),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_url(process: subprocess.Popen[str]) -> str:
    """From the first line it logs."""
    assert process.stderr is not None
    line = process.stderr.readline()
    match = re.search(r"http://[\d.:]+", line)
    assert match, line
    return match[0]


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while httpx.get(f"{url}/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_from_start_to_end(tiny_folder: Path) -> None:
    args = [str(tiny_folder), "--device", "cpu", "--served-model-name", "tiny,nickname", "--max-model-len", "128"]
    with server(*args, command=[sys.executable, "-c", OBSERVED]) as process:
        url = read_url(process)
        assert httpx.get(f"{url}/health/live").status_code == 200, "it listens before the model is there"
        wait_ready(url)
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == ["tiny", "nickname"]
        body = {"model": "nickname", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert reply.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "is ready" in out and f"{url}/docs" in out and "128 tokens" in out
    assert "imported torch: False" in out
    assert "Traceback" not in err


def test_ctrl_c_while_the_model_is_loaded(tiny_folder: Path) -> None:
    with server(str(tiny_folder), "--device", "cpu") as process:
        httpx.get(f"{read_url(process)}/health/live")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith("stopped")


def test_a_model_that_cannot_be_loaded_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_folder.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).symlink_to(file)
    done = tonle("serve", str(broken), "--port", "0", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr and "stopping" not in done.stderr


def test_an_adapter_with_the_models_own_name_is_refused(tiny_folder: Path) -> None:
    lora = f"{tiny_folder.name}=/no/such/adapter"
    done = tonle("serve", str(tiny_folder), "--port", "0", "--device", "cpu", "--lora", lora)
    assert done.returncode == 1
    assert f"Error: adapter {tiny_folder.name}: the model itself is served under that name" in done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr


def test_a_port_in_use_is_told_before_anything_slow() -> None:
    with bind("127.0.0.1", 0) as taken:
        done = tonle("serve", "/no/such/model", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "another program is using it" in done.stderr


def test_json_logs_have_no_banner_between_them(tiny_folder: Path) -> None:
    with server(str(tiny_folder), "--device", "cpu", "--log-json") as process:
        wait_ready(read_url(process))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert out == ""
    assert any("is ready at" in json.loads(line)["message"] for line in err.splitlines())


HERE = ServerInfo(host="127.0.0.1", port=8000)


@pytest.mark.parametrize("chats", [True, False])
def test_the_banner_has_a_line_that_can_be_pasted(chats: bool) -> None:
    name = "it's [bold]odd[/bold]"
    shown = banner(name, CARD, HERE, 1.5, chats=chats)
    assert "1600 tokens in int8, up to 8 requests at once" in shown
    assert "none: this machine only" in shown
    words = pasted(shown)
    assert words[1] == f"http://127.0.0.1:8000/v1/{'chat/completions' if chats else 'completions'}"
    assert json.loads(words[-1])["model"] == name


def pasted(shown: str) -> list[str]:
    line = next(line for line in shown.splitlines() if "curl" in line).replace("\\[", "[")
    return shlex.split(line)


def test_the_banner_says_that_a_key_is_needed_and_where_records_go() -> None:
    server = ServerInfo(host="127.0.0.1", port=8000, has_keys=True, audit_dir="/var/audit")
    shown = banner("m", CARD, server, 1.5, chats=True)
    assert "Authorization: Bearer $TONLE_API_KEY" in pasted(shown)
    assert "required, as a bearer token" in shown and "/var/audit" in shown


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({}, None),
        ({"lora": (("one", "/a"), ("two", "/b"))}, "adapters one, two"),
        ({"lora": (("one", "/a"),), "enable_lora": True}, "adapter one; every caller may load and remove adapters"),
        ({"enable_lora": True}, "no adapters yet; every caller may load and remove adapters"),
        (
            {"enable_lora": True, "admin_key": ("k",)},
            "no adapters yet; keys with scope admin may load and remove adapters",
        ),
        (
            {"lora": (("one", "/a"),), "api_key": ("k",)},
            "adapter one; keys with scope admin may load and remove adapters",
        ),
        ({"lora": tuple((f"a{n}", "/a") for n in range(10))}, "adapters a0, a1, a2, a3, a4, a5, a6, a7 and 2 more"),
    ],
)
def test_the_banner_names_adapters_and_who_may_load_more(settings: dict[str, Any], fact: str | None) -> None:
    with bind("127.0.0.1", 0) as listener:
        shown = banner("m", CARD, ServerInfo.of(listener, ServeConfig(**settings)), 1.5, chats=True)
    lines = [line for line in shown.splitlines() if "LoRA" in line]
    assert lines == ([] if fact is None else [f"  [dim]LoRA     [/dim] {fact}"])


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({}, "http://127.0.0.1:8000/dashboard"),
        ({"admin_key": ("k",)}, "http://127.0.0.1:8000/dashboard, for keys of scope admin or dashboard"),
        (
            {"api_key": ("k",), "state_db": "/x"},
            "http://127.0.0.1:8000/dashboard, for keys of scope admin or dashboard",
        ),
        ({"api_key": ("k",)}, "closed: give --admin-key KEY, which opens it"),
        ({"dashboard": False}, None),
        ({"frontends": 2}, None),
    ],
)
def test_the_banner_says_where_the_dashboard_is(settings: dict[str, Any], fact: str | None) -> None:
    with bind("127.0.0.1", 0) as listener:
        server = dataclasses.replace(ServerInfo.of(listener, ServeConfig(**settings)), port=8000)
    lines = [line for line in banner("m", CARD, server, 1.5, chats=True).splitlines() if "Dashboard" in line]
    assert lines == ([] if fact is None else [f"  [dim]Dashboard[/dim] {fact}"])
    if not settings:
        assert (
            dataclasses.replace(server, host="0.0.0.0").dashboard_fact == "closed: give --admin-key KEY, which opens it"
        )


@pytest.mark.parametrize(
    ("host", "has_keys", "is_open", "bound", "here"),
    [
        ("127.0.0.1", False, False, "http://127.0.0.1:80/v1", "http://127.0.0.1:80"),
        ("0.0.0.0", False, True, "http://0.0.0.0:80/v1", "http://127.0.0.1:80"),
        ("0.0.0.0", True, False, "http://0.0.0.0:80/v1", "http://127.0.0.1:80"),
        ("192.0.2.7", False, True, "http://192.0.2.7:80/v1", "http://192.0.2.7:80"),
        ("::", False, True, "http://[::]:80/v1", "http://[::1]:80"),
        ("::1", False, False, "http://[::1]:80/v1", "http://[::1]:80"),
        ("fe80::1%eth0", False, True, "http://[fe80::1%eth0]:80/v1", "http://[fe80::1%eth0]:80"),
    ],
)
def test_a_door_knows_who_can_reach_it(host: str, has_keys: bool, is_open: bool, bound: str, here: str) -> None:
    server = ServerInfo(host=host, port=80, has_keys=has_keys)
    assert (server.is_open, server.url) == (is_open, here)
    assert server.address.startswith(bound)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("Q4_1", "Q4_1 in the file, computed in float32 on cpu"),
        ("F32", "float32 on cpu"),
        ("bfloat16", "bfloat16 in the file, computed in float32 on cpu"),
        ("", "random, float32 on cpu"),
    ],
)
def test_weights_are_told_as_stored_and_as_computed(stored: str, words: str) -> None:
    assert weights(msgspec.structs.replace(CARD, stored=stored)) == words


def test_the_banner_names_what_weights_became() -> None:
    card = msgspec.structs.replace(CARD, stored="bfloat16", quantized_to="int4")
    assert weights(card) == "bfloat16 in the file, quantized to int4, computed in float32 on cpu"


def test_an_open_server_warns(tiny_folder: Path) -> None:
    with server(str(tiny_folder), "--device", "cpu", "--host", "0.0.0.0") as process:
        assert process.stderr is not None
        warning = process.stderr.readline()
    assert "WARNING" in warning and "anyone who reaches port" in warning and "--api-key" in warning
    assert "127.0.0.1" in warning, "and how to close it"


def test_a_server_with_a_key_says_so_and_keeps_it_to_itself(tiny_folder: Path) -> None:
    with server(str(tiny_folder), "--device", "cpu", "--host", "0.0.0.0", "--api-key", "sk-secret-1") as process:
        wait_ready(read_url(process))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert "sk-secret-1" not in out + err, "keys stay off the screen"
    assert "$TONLE_API_KEY" in out and "0.0.0.0" in out
    assert "WARNING" not in err
    assert err.splitlines()[-1].endswith("stopped")
