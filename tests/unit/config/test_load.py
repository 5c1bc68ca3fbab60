"""File < environment < flags, and what each refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tonle.audit.audit_options import from_config, from_environ
from tonle.config.audit import AuditConfig
from tonle.config.cache_dir import cache_dir
from tonle.config.gateway import GatewayConfig
from tonle.config.load_settings import load, load_gateway
from tonle.config.serve import ServeConfig
from tonle.config.setting import settings_of
from tonle.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "tonle.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_is_the_defaults() -> None:
    assert load({}, environ={}) == ServeConfig()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax_num_seqs: 2\nblock_size: 4\nserved_model_name: [a, b]\n")
    environ = {"TONLE_PORT": "10", "TONLE_MAX_NUM_SEQS": "20"}
    config = load({"port": "100"}, file=file, environ=environ)
    assert (config.port, config.max_num_seqs, config.block_size) == (100, 20, 4)
    assert config.served_model_name == ("a", "b")


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "kv_cache_memory: 2GiB\ndrain: 1m\nmax_model_len: null\nprefix_caching: no\n")
    config = load({}, environ={"TONLE_CONFIG": str(file)})
    assert (config.kv_cache_memory_bytes, config.drain_s, config.prefix_caching) == (2 * 1024**3, 60.0, False)


def test_a_flag_can_take_back_what_a_variable_set() -> None:
    assert load({"max_model_len": "none"}, environ={"TONLE_MAX_MODEL_LEN": "64"}).max_model_len is None


def test_an_empty_variable_is_none_at_all() -> None:
    assert load({}, environ={"TONLE_PORT": "", "TONLE_MODEL": ""}) == ServeConfig()


def test_variables_of_other_uses_are_left_alone() -> None:
    environ = {"TONLE_DEBUG": "1", "TONLE_K8S_SCHEMAS": "x", "TONLE_SEED_DOCS": "y", "TONLES_PORT": "x", "PATH": "/bin"}
    assert load({}, environ=environ) == ServeConfig()


def test_the_cache_directory_is_for_this_process_and_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TONLE_CACHE_DIR", "/from/the/environment")
    assert load({}).cache_dir == "/from/the/environment"
    monkeypatch.chdir(tmp_path)
    load({"cache_dir": "here"})
    assert os.environ["TONLE_CACHE_DIR"] == str(tmp_path / "here") and cache_dir() == tmp_path / "here"


def test_a_gateway_may_share_an_environment_with_a_server() -> None:
    environ = {"TONLE_CACHE_DIR": "/tmp", "TONLE_MAX_NUM_SEQS": "3"}
    assert load_gateway({}, environ=environ) == GatewayConfig()


def test_what_kubernetes_says_of_a_service_called_tonle_is_not_ours() -> None:
    environ = {
        "TONLE_SERVICE_HOST": "10.0.0.1",
        "TONLE_SERVICE_PORT": "8000",
        "TONLE_SERVICE_PORT_HTTP": "8000",
        "TONLE_PORT": "tcp://10.0.0.1:8000",
        "TONLE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TONLE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TONLE_ROUTER_SERVICE_HOST": "10.0.0.2",
        "TONLE_ROUTER_PORT": "tcp://10.0.0.2:8000",
    }
    assert load({}, environ=environ) == ServeConfig()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TONLE_DRAIN_SECONDS": "3"}, r"unknown .* TONLE_DRAIN_SECONDS; did you mean TONLE_DRAIN\? The unit"),
        ({"TONLE_MAX_NUM_SEQ": "3"}, r"unknown .* TONLE_MAX_NUM_SEQ; did you mean TONLE_MAX_NUM_SEQS\?"),
        ({"TONLE_XYZZY": "3"}, r"unknown environment variable TONLE_XYZZY; there are: .*TONLE_PORT"),
        ({"TONLE_PORT": "http"}, r"TONLE_PORT must be a whole number from 0 to 65535, not 'http'"),
        ({"TONLE_DEVICE": "tpu"}, r"TONLE_DEVICE must be auto, cpu, cuda or cuda:N, not 'tpu'"),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, environ=environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drain_s: 3", r"unknown setting 'drain_s'; did you mean drain\? The unit goes with the value"),
        ("prot: 8000", r"tonle.yaml: unknown setting 'prot'; did you mean port\?"),
        ("max-num-seqs: 8", r"tonle.yaml: unknown setting 'max-num-seqs'; did you mean max_num_seqs\?"),
        ("port: many", r"tonle.yaml: port must be a whole number .* not 'many'"),
        ("port: 8000.5", r"tonle.yaml: port must be a whole number"),
        ("host: null", r"tonle.yaml: host must be text, not None"),
        ("strict: perhaps", r"tonle.yaml: strict must be true or false"),
        ("3: 4", r"tonle.yaml: unknown setting 3;"),
        ("- port", r"tonle.yaml must hold one setting per line, .* not a list"),
        ("port: [", r"tonle.yaml is not YAML: line 1, column 8: expected the node content, but found '<stream end>'$"),
        ("port: 1\n  host: a", r"tonle.yaml is not YAML: line 2, column 7: mapping values are not allowed here$"),
        ("port: *secret", r"tonle.yaml is not YAML: line 1, column 7: it cannot be read$"),
        ("port: \x01", r"tonle.yaml is not YAML: special characters are not allowed$"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, file=write(tmp_path, text), environ={})


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load({}, file=write(tmp_path, "# nothing yet\n"), environ={}) == ServeConfig()


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings in .*gone.yaml: No such file"):
        load({}, file=tmp_path / "gone.yaml", environ={})


def test_a_file_that_is_no_text_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "tonle.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load({}, file=file, environ={})


AUDIT = {
    "dir": "trail", "fsync": "always", "fsync_interval": "5s", "on_full": "serve", "min_free": "1GiB", "max_queue": "7",
    "linger": "1ms", "redact": "email,phone,plate=[A-Z]{2,3}", "omit": "messages,client", "retention_days": "30",
    "key_file": "elsewhere/key", "fingerprint": "ab" * 32, "anchor": "elsewhere/anchors",
    "max_memory": "1MiB", "refused_per_address": "3", "refused_per_second": "30", "media": "none",
}  # fmt: skip


def test_audit_settings_have_one_name_in_file_environment_and_flags_of_server_gateway_and_middleware(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "\n".join(f"audit_{name}: '{value}'" for name, value in AUDIT.items()))
    environ = {f"TONLE_AUDIT_{name.upper()}": value for name, value in AUDIT.items()}
    flags = {f"audit_{name}": value for name, value in AUDIT.items()}
    found = [from_environ(environ)]
    for read in (load, load_gateway):
        for config in (read({}, file=file, environ={}), read({}, environ=environ), read(flags, environ={})):
            options = from_config(config)
            assert options is not None
            found.append(options)
    assert found == [found[0]] * 7
    assert found[0].redact == ("email", "phone", "plate=[A-Z]{2,3}")
    assert (found[0].directory, found[0].key_file) == (Path("trail"), Path("elsewhere/key"))
    assert {f"audit_{name}" for name in AUDIT} == set(settings_of(AuditConfig))


def test_a_server_may_share_the_environment_of_the_middleware() -> None:
    environ = {"TONLE_AUDIT_INJECT_USAGE": "off", "TONLE_AUDIT_MAX_BODY": "1MiB"}
    assert load({}, environ=environ) == ServeConfig()
