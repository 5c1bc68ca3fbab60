"""Small kinds for tests: what a job does stands in its fields. Run in real worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonle.errors import CapacityError, InvalidRequest, ModelError, TonleError
from tonle.workers.kind import Job, Kind, Result


class Scripted(Kind):
    """Echoes its job, after what `do` says. Each begin of a job is a line in the file `notes`."""

    streams = True

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        self.model, self.device, self.options = model, device, options
        self.leaked: list[bytearray] = []
        if options.get("refuse"):
            raise ModelError(options["refuse"])
        if options.get("crash"):
            raise KeyError(options["crash"])
        if (once := options.get("die_unless")) and not Path(once).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def warm_up(self) -> list[Job]:
        return [Job({"do": "echo", "name": "warm-up"})]

    def describe(self) -> dict[str, Any]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"device": self.device, "visible": visible, "threads": os.environ.get("OMP_NUM_THREADS")}

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._one(job, len(batch)) for job in batch]

    def _one(self, job: Job, batch_size: int) -> Result | TonleError:
        fields = job.fields
        self._note(fields)
        match fields.get("do", "echo"):
            case "refuse":
                return InvalidRequest("not like this", param="name")
            case "busy":
                return CapacityError("later", retry_after_s=7.0)
            case "raise":
                raise ValueError("secret of the worker")
            case "raise ours":
                raise InvalidRequest("none of them", param="all")
            case "unsendable":
                return Result({"value": object()})
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die once" if not Path(fields["flag"]).exists():
                Path(fields["flag"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "hang once" if not Path(fields["flag"]).exists():
                Path(fields["flag"]).touch()
                time.sleep(600)
            case "wait":  # for a file
                while not Path(fields["flag"]).exists():
                    time.sleep(0.005)
            case "leak":
                self.leaked.append(bytearray(os.urandom(1024)) * 1024 * fields["mb"])
            case "broken device":
                raise RuntimeError("CUDA error: device-side assert triggered")
        media = tuple(bytes(one)[::-1] for one in job.media) if fields.get("reverse") else job.media
        return Result({"name": fields.get("name"), "pid": os.getpid(), "batch_size": batch_size}, media)

    def stream(self, job: Job) -> Iterator[Result]:
        self._note(job.fields)
        try:
            for number in range(job.fields["pieces"]):
                match job.fields.get("do"):
                    case "die" if number == job.fields["at"]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "raise" if number == job.fields["at"]:
                        raise OSError("secret of the worker")
                    case "hang" if number == job.fields["at"]:
                        time.sleep(600)
                    case "endless":
                        time.sleep(0.002)
                yield Result({"number": number, "pid": os.getpid()}, job.media)
        finally:
            if "closed" in job.fields:
                Path(job.fields["closed"]).touch()

    def _note(self, fields: dict[str, Any]) -> None:
        if "notes" in self.options:
            with Path(self.options["notes"]).open("a") as file:
                file.write(f"{fields.get('name')}\n")


class OneByOne(Scripted):
    batches = False
    streams = False


class NotAKind:
    pass
