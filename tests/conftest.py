"""What all tests share."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

# Some tests press Ctrl-C. Started in a shell's background, this process was told to ignore it, and so would its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is loaded: its threads must not spin while they wait. Tests often share a machine with others, and one
# spinning thread there costs seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What servers remember of audit trails and keys goes to a folder of this run, not to the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tonle-test-state-")

import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.fakes.server import Server, tonle_serve
from tonle.config.cache_dir import cache_dir
from tonle.models import default_model as pinned
from tonle.models.source import ModelSource, resolve

STATE_HOME = os.environ["XDG_STATE_HOME"]

# Generated cases take the time they take, and are the same in every run: `make fuzz` is for new ones.
hypothesis.settings.register_profile(
    "tonle",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tonle")

# Where a test says nothing else, httpx gives up after 5 s: on a busy machine a right answer may take longer.
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 120.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests marked `long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One case of each truth is in every run; those marked `long` only with --long, or asked for by name or mark."""
    for item in items:
        if item.get_closest_marker("crossed") and _num_changed(item) > 1:
            item.add_marker("long")
    if config.getoption("--long") or "long" in config.getoption("-m") or any("::" in each for each in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def _num_changed(item: pytest.Item) -> int:
    """How many of its lists of values this case takes another value from than the first."""
    case = getattr(item, "callspec", None)
    if case is None:
        return 0
    num_changed = 0
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
        first = next(iter(values))
        first = getattr(first, "values", first)  # of pytest.param
        wanted = list(first) if len(names) > 1 else [first]
        num_changed += repr([case.params[name] for name in names]) != repr(wanted)
    return num_changed


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, if it is on this machine: tests never fetch."""
    path = pinned.path(cache_dir())
    if not pinned.is_present(path):
        pytest.skip(f"the default model is not at {path}; `tonle pull` (or `make test`) fetches it")
    return resolve(None, progress=False)


@pytest.fixture(scope="session")
def default_server(default_model: ModelSource) -> Iterator[Server]:
    """`tonle serve` with the default model, one for all files that do nothing to it but ask: it takes long to start."""
    with tonle_serve() as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def same_log() -> Iterator[None]:
    """An engine sets the level of the package's log, for good: not for the next file of tests."""
    log = logging.getLogger("tonle")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
