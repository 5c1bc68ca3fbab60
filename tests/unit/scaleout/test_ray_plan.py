"""What `tonle ray up` makes of a settings file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tonle.config.load_settings import load, load_ray
from tonle.errors import ConfigError
from tonle.scaleout.ray_plan import RayPlan, plan_of


def plan(folder: Path, ray: dict[str, Any] | None = None, *, cluster_gpus: int = 0, **settings: Any) -> RayPlan:
    file = folder / "tonle.yaml"
    file.write_text(json.dumps(settings | {"ray": ray or {}, "deploy": {"name": "x"}}))
    serve, config, content = load_ray({}, file=file)
    load({}, file=file, environ={})  # servers pass the sections over
    return plan_of(serve, config, content, cluster_gpus=cluster_gpus)


def test_resources_are_those_of_the_cluster_unless_told(tmp_path: Path) -> None:
    assert plan(tmp_path).resources.bundle() == {"CPU": 1}
    assert plan(tmp_path, cluster_gpus=8).resources.bundle() == {"CPU": 1, "GPU": 1}
    assert plan(tmp_path, cluster_gpus=8, tensor_parallel_size=4).resources.gpus == 4
    with pytest.raises(ConfigError, match="leave gpus out"):
        plan(tmp_path, {"gpus": 2}, tensor_parallel_size=4)
    wanted = {"gpus": 4, "cpus": 8, "accelerator": "H100"}
    assert plan(tmp_path, wanted).resources.bundle() == {"CPU": 8, "GPU": 4, "accelerator_type:H100": 0.001}
    with pytest.raises(ConfigError, match="cpus: 1"):
        plan(tmp_path, {"cpus": 0})


def test_the_version_changes_with_what_a_replica_is_and_with_nothing_else(tmp_path: Path) -> None:
    first = plan(tmp_path, max_num_seqs=8)
    assert plan(tmp_path, {"max_replicas": 9, "scale_down_delay": "1m"}, max_num_seqs=8).spec == first.spec
    assert plan(tmp_path, max_num_seqs=9).spec.version != first.spec.version
    assert plan(tmp_path, {"cpus": 2}, max_num_seqs=8).spec.version != first.spec.version
    assert json.loads(first.spec.settings) == {"max_num_seqs": 8}


def test_what_scaling_needs_to_know(tmp_path: Path) -> None:
    scale = plan(tmp_path).controller.scale
    assert (scale.max_num_seqs, scale.min_replicas, scale.max_replicas) == (32, 1, 4)
    assert plan(tmp_path, cluster_gpus=1).controller.scale.max_num_seqs == 256
    keyed = plan(tmp_path, {"scale_up_delay": "2s"}, max_num_seqs=7, api_key=["k"]).controller
    assert (keyed.scale.max_num_seqs, keyed.scale.up_delay_s, keyed.api_key) == (7, 2.0, "k")


@pytest.mark.parametrize(
    ("ray", "why"),
    [
        ({"min_replicas": 5, "max_replicas": 2}, "raise max_replicas"),
        ({"cpus": 0, "gpus": 0}, "set cpus: 1"),
        ({"replicas": 2}, "did you mean"),
        ({"min_replicas": 0}, "min_replicas"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, ray: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(tmp_path, ray)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """The plan travels to the controller; a log of it must not have the key."""
    assert "s3cret" not in repr(plan(tmp_path, api_key=["s3cret"]))
