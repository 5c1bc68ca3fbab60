"""Settings of discovery: YAML, the short form of the flag, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonle.config.discovery import DiscoveryConfig, FileDiscovery, KubernetesDiscovery
from tonle.config.gateway import SETTINGS
from tonle.config.load_settings import load_gateway
from tonle.errors import ConfigError

read = SETTINGS["discovery"].type.read


def kubernetes(**fields: object) -> tuple[DiscoveryConfig, ...]:
    return (DiscoveryConfig(kubernetes=KubernetesDiscovery(**fields)),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"kubernetes": {"service": "llm", "namespace": "models", "port": "http"}},
         kubernetes(service="llm", namespace="models", port="http")),
        ("kubernetes:models/llm:8000", kubernetes(service="llm", namespace="models", port=8000)),
        ("kubernetes:llm:http", kubernetes(service="llm", port="http")),
        ("kubernetes:llm", kubernetes(service="llm")),
        ("file:/etc/backends.yaml", (DiscoveryConfig(file=FileDiscovery(path="/etc/backends.yaml")),)),
        ("{file: {path: x, interval_s: 5}}", (DiscoveryConfig(file=FileDiscovery(path="x", interval_s=5)),)),
        (["file:x", {"file": {"path": "y"}}],
         (DiscoveryConfig(file=FileDiscovery(path="x")), DiscoveryConfig(file=FileDiscovery(path="y")))),
    ],
)  # fmt: skip
def test_one_source_or_several(written: object, found: tuple[DiscoveryConfig, ...]) -> None:
    assert read(written) == found


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("consul:x", "must be kubernetes:NAMESPACE/SERVICE:PORT, file:PATH or "),
        ({}, "give one kind of source"),
        ({"file": {"path": "x"}, "kubernetes": {"service": "s"}}, "give one kind of source"),
        ({"kubernetes": {}}, "lacks 'service'"),
        ({"kubernetes": {"service": "Not_A_Name"}}, "is not right"),
        ({"kubernetes": {"service": "s", "port": 70000}}, "is not right"),
        ({"kubernetes": {"service": "s", "backend": {"url": "http://x"}}}, "must not set url in backend"),
        ({"kubernetes": {"service": "s", "backend": {"wieght": 1}}}, "unknown field 'wieght'"),
        ({"file": {"path": ""}}, "is not right"),
    ],
)
def test_what_is_refused(written: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(written)


def test_in_a_file_a_flag_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "tonle.yaml").write_text("discovery: {kubernetes: {service: llm, namespace: n}}\n")
    wanted = kubernetes(service="llm", namespace="n")
    assert load_gateway({}, file=tmp_path / "tonle.yaml", environ={}).discovery == wanted
    assert load_gateway({}, environ={"TONLE_DISCOVERY": "kubernetes:n/llm"}).discovery == wanted
    assert load_gateway({"discovery": ["kubernetes:n/llm"]}, environ={}).discovery == wanted


def test_experiments_may_name_backends_that_are_yet_to_be_found() -> None:
    arms = [{"name": "a", "weight": 1, "backend": "pod-1"}, {"name": "b", "weight": 1}]
    flags = {"experiments": [{"name": "e", "model": "m", "arms": arms}]}
    with pytest.raises(ConfigError, match="names backend pod-1, but there is none"):
        load_gateway({**flags, "backends": ["http://x"]}, environ={})
    assert load_gateway({**flags, "discovery": ["file:x"]}, environ={}).experiments


def test_an_order_of_regions_needs_a_region() -> None:
    with pytest.raises(ConfigError, match="region_order has no effect without region"):
        load_gateway({"backends": ["http://x"], "region_order": ["us"]}, environ={})
    assert load_gateway(
        {"backends": ["http://x"], "region_order": ["us,ap"], "region": "eu"}, environ={}
    ).region_order == (
        "us",
        "ap",
    )
