"""As many threads as a container has processors' time for, not as its machine has processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonle.config import cores
from tonle.config.cores import cores_of_limit, num_cores
from tonle.models.cpu.team import Team


def limit_of(folder: Path, own: str, files: dict[str, str]) -> int | None:
    """`own`: what the process is told of its cgroups; `files`: below where they are mounted."""
    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return cores_of_limit(folder / "own", folder / "mounted")


@pytest.mark.parametrize(("own", "files", "expected"), [
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),  # one thread would leave a third of it unused
    ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),  # a pod around a container
    ("0::/a/b\n", {"cpu.max": "400000 100000\n"}, 4),  # a container that sees its own group alone
    ("0::/../other\n", {"cpu.max": "max 100000\n"}, None),
    ("4:memory:/x\n2:cpu,cpuacct:/x\n0::/\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
                                               "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 3),
    ("1:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ("1:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ("1:cpuset:/x\n", {"cpuset/cpu.max": "100000 100000\n"}, None),  # says which processors, not how much of them
    ("0::/\n", {"cpu.max": "nonsense\n"}, None),
    ("0::/\n", {}, None),
    ("", {}, None),
])  # fmt: skip
def test_the_smallest_limit_counts_in_whole_processors(
    tmp_path: Path, own: str, files: dict[str, str], expected: int | None
) -> None:
    assert limit_of(tmp_path, own, files) == expected


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cores_of_limit(tmp_path / "absent", tmp_path) is None


def test_a_team_has_no_more_threads_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cores_of_limit", lambda: 2)
    assert num_cores() == 2 and Team().size == 2
    monkeypatch.setattr(cores, "cores_of_limit", lambda: 100)
    assert num_cores() == 64
    monkeypatch.setattr(cores, "cores_of_limit", lambda: None)
    assert num_cores() == 64
