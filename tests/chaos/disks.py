"""A small disk of the gateway's own, for its audit trail: filled, and made read-only.

Does: mount a tmpfs of 48 MiB, fill it, mount it once more over itself as read-only. A file system with files open for
writing cannot be remounted read-only (the kernel refuses), so the second mount is what everything opened by name from
then on meets; what is open already goes on, as on a disk that fails later. Needs the right to mount: `own_mounts`
gets it in a mount namespace, so that nothing is left mounted however the run ends. Does not: touch other mounts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.programs import Skip

SIZE = "48m"
_MARK = "CHAOS_OWN_MOUNTS"
_CHUNK = b"\0" * 65536


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(_CHUNK):
                pass

    def empty(self) -> None:
        self._filler.unlink()

    def make_read_only(self) -> None:
        _run("mount", "--bind", str(self.folder), str(self.folder))
        _run("mount", "-o", "remount,bind,ro", str(self.folder))

    def make_writable(self) -> None:
        _run("umount", str(self.folder))


def own_mounts() -> None:
    """Start this program again in a mount namespace of its own, if the system lets it; else go on without."""
    if os.environ.get(_MARK):
        return
    users = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    command = ["unshare", *users, "--mount"]
    os.environ[_MARK] = "no"
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            os.environ[_MARK] = "yes"
            os.execvp(command[0], [*command, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    if os.environ.get(_MARK) != "yes":
        raise Skip("this user may not mount: run it as root, or where unprivileged user namespaces are allowed")
    folder.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chaos", str(folder))
    except subprocess.CalledProcessError as error:
        raise Skip(f"a tmpfs cannot be mounted here: {error.stderr.decode().strip()}") from None
    try:
        yield Disk(folder)
    finally:
        _run("umount", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
