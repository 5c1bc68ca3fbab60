"""The engine in a process of its own: `EngineProcess` is the parent's side, `main` the child's.

Run as `python -m tonle.engine.process CONTROL_FD [LISTENER_FD]`: the settings come first, everything after that is mail.
With a listener, fronts in other processes connect there. Does not: start again what died (`child/supervisor.py` does).
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import msgspec

from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings
from tonle.child.supervisor import Backoff, Supervisor
from tonle.config.cores import cores_of_limit, num_cores
from tonle.config.engine import EngineConfig
from tonle.engine.link import Receiver, check_reads
from tonle.engine.messages import Failed, ModelCard, ToEngine, ToFront
from tonle.engine.socket_mailbox import SocketMailbox
from tonle.errors import CallerError, EngineDied, TonleError
from tonle.models.source import ModelSource
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")

_FIRST_BACKOFF_S = 0.5


class EngineSettings(msgspec.Struct):
    """The first message to the child."""

    source: ModelSource
    config: EngineConfig
    log_level: str
    log_json: bool


class EngineProcess:
    """Owns the engine's process. Give `send` to a `Front`, then `start(front)`.

    `listener` is a listening Unix socket where more fronts reach the engine; it stays ours when an engine dies.
    """

    def __init__(self, source: ModelSource, config: EngineConfig, *, listener: socket.socket | None = None) -> None:
        self._source = source
        self._config = config
        self._sockets = [] if listener is None else [listener]
        self._supervisor: Supervisor | None = None
        self._front: Receiver | None = None
        self._failure: TonleError | None = None  # what the engine said when it could not start
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToFront)

    @property
    def num_starts(self) -> int:
        return 0 if self._supervisor is None else self._supervisor.num_starts

    @property
    def pid(self) -> int | None:
        return None if self._supervisor is None else self._supervisor.pid

    def send(self, message: ToEngine) -> None:
        """Never waits. Raises `EngineRestarting` if the engine does not read."""
        if self._supervisor is not None:
            check_reads(message, self._supervisor.num_unsent)
            self._supervisor.send(self._encode(message))

    async def start(self, front: Receiver) -> None:
        """Start it and keep it running. Returns at once; `wait_ready` waits for the model."""
        self._front = front
        self._supervisor = Supervisor(
            "the engine",
            "tonle.engine.process",
            EngineSettings(self._source, self._config, logs.level(), logs.is_json()),
            sockets=self._sockets,
            receive=self._receive,
            on_exit=self._lose,
            log=log,
            backoff=Backoff(_FIRST_BACKOFF_S),
        )
        await self._supervisor.start()

    async def wait_ready(self) -> None:
        """Until the first engine is ready; raises what kept it from starting."""
        assert self._supervisor is not None, "start it first"
        if not await self._supervisor.wait_ready():
            raise EngineDied("it was stopped before it was ready")

    async def stop(self) -> None:
        """End the process: ask, then insist."""
        if self._supervisor is not None:
            await self._supervisor.stop()

    def _receive(self, body: bytes) -> bool:
        """True if the engine is ready."""
        assert self._front is not None
        message = self._decoder.decode(body)
        self._front.deliver(message)
        if isinstance(message, Failed):
            self._failure = message.error
        if not isinstance(message, ModelCard):
            return False
        if self.num_starts > 1:
            log.info("the engine is back after %.1f s of loading", message.load_s)
        return True

    def _lose(self, reason: str) -> TonleError:
        assert self._front is not None
        error = EngineDied(reason)
        self._front.lose(error)
        return self._failure or error


# -- in the child


def main(control: socket.socket, listener: socket.socket | None = None) -> int:
    """The engine's process: build what the settings name, then run the loop until told to stop."""
    ignore_signals()
    # torch's threads would spin between its operations, on cores that our own kernels and the HTTP process need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if cores_of_limit() is not None:  # of which torch knows nothing
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))
    settings = read_settings(control, EngineSettings)
    logs.configure(settings.log_level, json=settings.log_json)
    mailbox = SocketMailbox(control, listener)
    try:
        from tonle.engine.build import build

        loop, card = build(settings.source, settings.config, mailbox, on_rank_lost=_end)
    except CallerError as error:
        mailbox.publish(Failed(error.message, caller_fault=True))
        return 1
    except Exception as error:
        log.exception("the engine could not start")
        mailbox.publish(Failed(f"{type(error).__name__}: {error}", caller_fault=False))
        return 1
    mailbox.publish(loop.adapters)
    mailbox.publish(card)
    loop.run()
    return 0


def _end(reason: str) -> None:
    """At once, whatever the loop waits for: our parent fails the requests and starts the next engine."""
    log.error("%s; the engine ends", reason)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*inherited_sockets()))
