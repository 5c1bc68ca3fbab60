"""`tonle deploy render systemd`: the unit, by systemd's own checks where they are installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.examples import committed_and_rendered, files_of
from tonle.errors import ConfigError

WITH_KEYS = {"deploy": {"name": "mine", "api_key_secret": "k", "hub_token_secret": "h"}}
CASES: list[dict[str, Any]] = [
    {},
    WITH_KEYS,
    {"model": "org/x-7B", "deploy": {"gpu": "L40S"}},
    {"model": "org/x-7B", "deploy": {"gpu": "A100", "gpus": 2, "engine": "vllm"}},
    {"served_model_name": 'odd "name" with 100% $HOME \\ in it'},
]


def unit_of(folder: Path, **settings: Any) -> tuple[str, dict[str, list[str]]]:
    """Name and values by key."""
    (file,) = files_of("systemd", folder, **settings).values()
    values: dict[str, list[str]] = {}
    for line in file.text.replace("\\\n", " ").splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return file.name, values


def test_the_example_is_what_is_rendered() -> None:
    committed, rendered = committed_and_rendered("systemd")
    assert committed == rendered


def test_it_has_the_time_to_drain(tmp_path: Path) -> None:
    _, unit = unit_of(tmp_path, drain="2m")
    assert "--drain=120s" in unit["ExecStart"][0]
    assert int(unit["TimeoutStopSec"][0]) > 120
    assert unit["KillMode"] == ["mixed"]  # SIGTERM for the engine as well would cut what is running
    assert unit["Restart"] == ["on-failure"]


def test_it_listens_where_the_settings_say(tmp_path: Path) -> None:
    assert "--host=127.0.0.1 " in unit_of(tmp_path)[1]["ExecStart"][0]
    assert "--host=0.0.0.0" in unit_of(tmp_path, host="0.0.0.0", port=9000)[1]["ExecStart"][0]
    assert "--port=9000" in unit_of(tmp_path, host="0.0.0.0", port=9000)[1]["ExecStart"][0]


def test_keys_are_credentials(tmp_path: Path) -> None:
    name, unit = unit_of(tmp_path, **WITH_KEYS)
    assert name == "tonle-mine.service"
    assert unit["LoadCredential"] == ["keys:/etc/tonle-mine/keys.yaml", "hub:/etc/tonle-mine/hub"]
    assert '"TONLE_CONFIG=%d/keys"' in unit["Environment"] and '"HF_TOKEN_PATH=%d/hub"' in unit["Environment"]
    assert "LoadCredential" not in unit_of(tmp_path)[1]


def test_what_it_writes_to_are_folders_of_its_own(tmp_path: Path) -> None:
    _, unit = unit_of(tmp_path)
    assert unit["ProtectSystem"] == ["strict"] and unit["DynamicUser"] == ["yes"]
    assert unit["CacheDirectory"] == unit["StateDirectory"] == ["tonle-smollm2-135m-instruct"]
    assert '"TONLE_CACHE_DIR=%C/tonle-smollm2-135m-instruct"' in unit["Environment"]
    assert "MemoryDenyWriteExecute" not in unit  # kernels are compiled while it runs


def test_vllm_is_told_the_same_as_in_a_container(tmp_path: Path) -> None:
    _, unit = unit_of(tmp_path, model="org/x-1B", max_model_len=4096, deploy={"engine": "vllm"})
    for variable in ("HF_HOME=%C/tonle-x-1b/huggingface", "HOME=%S/tonle-x-1b", "VLLM_CPU_KVCACHE_SPACE=4"):
        assert f'"{variable}"' in unit["Environment"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "org/x-1B", "deploy": {"storage_uri": "hf://org/x-1B:main"}}, "without a revision"),
        ({"model": "/home/me/models/x-1B", "deploy": {"parameters": "1B"}}, "cannot see; move it"),
        ({"model": "./x-1B", "deploy": {"parameters": "1B"}}, "must be an absolute path"),
        ({"model": "org/x-1B", "deploy": {"storage_uri": "gs://b/x"}}, "cannot be read by systemd"),
        (
            {"model": "org/x-1B", "max_model_len": 4096, "deploy": {"engine": "vllm", "api_key_secret": "k"}},
            "vLLM reads no key from a file",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        unit_of(tmp_path, **settings)


def test_a_model_elsewhere_on_the_machine_is_served(tmp_path: Path) -> None:
    _, unit = unit_of(tmp_path, model="/srv/models/x-1B", deploy={"parameters": "1B"})
    assert shlex.split(unit["ExecStart"][0])[:3] == ["/opt/tonle/bin/tonle", "serve", "/srv/models/x-1B"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("settings", CASES)
def test_systemd_reads_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    (file,) = files_of("systemd", tmp_path, **settings).values()
    program = file.text.partition("ExecStart=")[2].split()[0]
    (tmp_path / file.name).write_text(
        file.text.replace(program, "/bin/true", 1).replace(f"ExecStart={program}", "ExecStart=/bin/true")
    )
    verified = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / file.name], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    secure = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", tmp_path / file.name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert secure.returncode == 0, secure.stdout[-300:]  # exposure below 2.5 of 10


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_complains_of_a_misspelt_line(tmp_path: Path) -> None:
    (file,) = files_of("systemd", tmp_path).values()
    text = file.text.replace("/opt/tonle/bin/tonle serve", "/bin/true serve").replace("ProtectSystem=", "ProtectSytem=")
    (tmp_path / file.name).write_text(text)
    verified = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / file.name], capture_output=True, text=True, check=False
    )
    assert "ProtectSytem" in verified.stderr
