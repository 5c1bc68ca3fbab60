"""`RayReplica`: an actor that is one replica: a `tonle serve` process on its node, with the GPUs that Ray gave it.

Does: start the process, tell where it answers or why it ended, stop it. Does not: carry requests: gateways send them to its port.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import tonle
from tonle.bench.server_process import ServerProcess
from tonle.edge.client import Address
from tonle.scaleout.ray_plan import ReplicaSpec

_LAST_LINES = 5  # of its log, in a report of its end


class RayReplica:
    def __init__(self, spec: ReplicaSpec) -> None:
        import ray.util

        self._spec = spec
        host = ray.util.get_node_ip_address()
        with socket.socket() as found:
            found.bind((host, 0))
            port = found.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="tonle-replica-")
        file = Path(self._folder.name) / "tonle.yaml"
        file.touch(mode=0o600)  # it may hold a key
        file.write_text(spec.settings, encoding="utf-8")
        command = [sys.executable, "-m", "tonle", "serve", "--config", str(file), "--host", host, "--port", str(port)]
        command += ["--history-db", "memory"]  # replicas of one node would share the file
        log = Path(self._folder.name) / "log"
        paths = [
            str(Path(tonle.__file__).parents[1]),
            *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        ]
        env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}  # the package of this very actor
        self._process = ServerProcess(command, port=port, log=log, env=env)
        self._url = str(Address(host, port))

    def report(self) -> dict[str, Any]:
        """Fields of `Report`."""
        ended = None
        if not self._process.is_running:
            ended = "its process ended: " + (" | ".join(self._process.last_lines(_LAST_LINES)) or "it printed nothing")
        return {"version": self._spec.version, "url": self._url, "ended": ended}

    def stop(self) -> None:
        """SIGTERM: it finishes what it has, as its own settings say."""
        self._process.stop()
        self._folder.cleanup()
