"""What it costs to note where the time of requests goes: the engine's loop with and without notes, in turns.

    python -m benchmarks.step_notes                                  # the loop alone: nothing is computed
    python -m benchmarks.step_notes --engine default                 # and a real step, on this machine's device
    python -m benchmarks.step_notes --engine qwen2.5-1.5b --rows 1,100,256    # random weights in this shape, on a GPU

Does: run closed loops of users through the real `Loop`, `Scheduler` and message encoding, and compare the CPU seconds of a step.
In the first columns a stand-in takes the runner's place, so that the loop is all there is: that share is the largest there can
be. With `--engine` the same added microseconds are compared with the CPU time of a real step. Does not: need a quiet machine (CPU
time, the best of rounds in turns), though it is more exact on one. Exits with 1 if the share of a step is over the target.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.workload import SHAPES, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.loop import Loop
from tonle.engine.messages import Step, Submit, ToEngine, ToFront
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, StepNotes

TARGET = 0.01  # of a step's CPU time
PROMPT, ANSWER = 216, 320  # tokens, on average, as in the preset "chat"; they vary by half
EACH = 4  # requests of one user in a round


class Users:
    """A mailbox behind which each user sends a request when the one before has ended."""

    def __init__(self, num_users: int, *, vocab_size: int = 1000, answer_tokens: int = ANSWER) -> None:
        self.num_steps = 0
        self._answer_tokens = answer_tokens
        self._encode = msgspec.msgpack.Encoder().encode
        self._vocab_size = vocab_size
        self._num_users = num_users
        self._mail: list[ToEngine] = []
        self._left: deque[Request] = deque()
        self._num_live = 0
        self._handles = 0

    @property
    def is_done(self) -> bool:
        return not self._num_live

    def begin(self, seed: int) -> None:
        """A round: the same requests for the same seed. Prompts begin differently, so none is found in the prefix cache."""
        rng = random.Random(seed)
        self.num_steps = 0
        for _ in range(self._num_users * EACH):
            self._handles += 1
            prompt = [rng.randrange(self._vocab_size) for _ in range(rng.randint(PROMPT // 2, PROMPT * 3 // 2))]
            config = ResolvedConfig(
                max_length=rng.randint(self._answer_tokens // 2, self._answer_tokens * 3 // 2),
                temperature=0.0,
                early_stopping=False,
                use_cache=False,
            )
            self._left.append(Request(handle=self._handles, prompt=prompt, config=config))
        for _ in range(self._num_users):
            self._send()

    def _send(self) -> None:
        if self._left:
            request = self._left.popleft()
            request.arrived_s = time.monotonic()
            self._mail.append(Submit([request]))
            self._num_live += 1

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail, self._mail = self._mail, []
        return mail

    def publish(self, message: ToFront) -> None:
        assert isinstance(message, Step) and not message.refused
        self._encode(message)  # as for a socket
        self.num_steps += bool(message.handles)
        for _ in message.finished:
            self._num_live -= 1
            self._send()


@dataclass(slots=True)
class _Launched:
    plan: Plan


class StandIn:
    """A runner that computes nothing."""

    profile = None

    def __init__(self, lag: int) -> None:
        self.lag = lag

    def launch(self, plan: Plan) -> _Launched:
        return _Launched(plan)

    def collect(self, launched: _Launched) -> StepResult:
        return StepResult([7] * sum(launched.plan.samples))


@dataclass(slots=True)
class Cost:
    """CPU seconds of a step, the least of all rounds: what else runs on the machine only ever adds to it."""

    without_s: float
    with_s: float

    @property
    def added_s(self) -> float:
        return self.with_s - self.without_s


def compare(loop: Loop, users: Users, rounds: int, clock: Callable[[], float]) -> Cost:
    """Rounds with and without notes in turns, all with the same requests."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for noted in (False, True) if number % 2 else (True, False):
            loop._scheduler.notes = StepNotes() if noted else None
            loop._scheduler.pool.drop_idle()
            users.begin(seed=1)
            began = clock()
            while not users.is_done or loop._launched:
                loop.step()
            if number:  # the first pair warms up
                found[noted].append((clock() - began) / users.num_steps)
    return Cost(min(found[False]), min(found[True]))


def bare_loop(rows: int, lag: int, answer_tokens: int) -> tuple[Loop, Users]:
    users: Any = Users(rows, answer_tokens=answer_tokens)
    limits = SchedulerLimits(
        max_num_seqs=rows, max_num_batched_tokens=4096, context_length=1024, block_size=16, long_prefill_tokens=2048
    )
    return Loop(Scheduler(limits, BlockPool(rows * 64), []), StandIn(lag), users), users  # type: ignore[arg-type]


def real_loop(model: str, rows: int, answer_tokens: int) -> tuple[Loop, Users, str]:
    from tonle.engine.build import build
    from tonle.engine.text.no_text import NoText
    from tonle.models.source import ModelSource, resolve

    users: Any = Users(rows, answer_tokens=answer_tokens)
    settings: dict[str, Any] = {"max_batch_size": rows, "max_sequence_length": 1024}
    if model in SHAPES:
        with tempfile.TemporaryDirectory() as root:
            source = ModelSource("folder", write_config(model, Path(root)), model)
            loop, card = build(source, EngineConfig(load_format="random", **settings), users, text=NoText())
    else:
        loop, card = build(resolve(None if model == "default" else model), EngineConfig(**settings), users)
    return loop, users, card.device


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,16,256", help="sequences that run at a time, one table row each")
    parser.add_argument(
        "--lag", type=int, default=1, choices=(0, 1), help="of the loop alone: 1 as on a GPU, 0 as on a CPU"
    )
    parser.add_argument("--answer-tokens", type=int, default=ANSWER, help="of a request on average; each costs once")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of rounds")
    parser.add_argument(
        "--engine", metavar="MODEL", help=f"a file or folder, 'default', or random weights: {', '.join(SHAPES)}"
    )
    options = parser.parse_args()
    console = Console()
    table = Table("rows", "loop alone, CPU us/step", "notes add, us", "share of that", "real step, CPU us", "share of a step",
                  title="notes of where the time of requests goes", title_justify="left")  # fmt: skip
    worst = 0.0
    for rows in map(int, options.rows.split(",")):
        loop, users = bare_loop(rows, options.lag, options.answer_tokens)
        cost = compare(loop, users, options.rounds, time.thread_time)
        line = [
            str(rows),
            f"{cost.without_s * 1e6:.1f}",
            f"{cost.added_s * 1e6:.2f}",
            f"{cost.added_s / cost.without_s:.2%}",
        ]
        share = None
        if options.engine is not None:
            engine, its_users, device = real_loop(options.engine, rows, options.answer_tokens)
            real = compare(engine, its_users, max(1, options.rounds // 5), time.process_time)
            share = cost.added_s / real.without_s
            worst = max(worst, share)
            line += [f"{real.without_s * 1e6:.0f} ({device})", f"{share:.2%}"]
            del engine
        table.add_row(*line)
    console.print(table)
    if options.engine is None:
        console.print("A real step computes besides: --engine compares with one.")
        return 0
    console.print(f"target: at most {TARGET:.0%} of a step's CPU time: {'holds' if worst <= TARGET else 'missed'}")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
