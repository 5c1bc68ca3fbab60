"""A team of threads that run one compiled function together, and the barrier they wait at.

Python is not involved between the start and the end of a call: the barrier is one number that the threads count up. Who waits
long for the others sleeps, so that a team loses little beside other programs on its processors.
"""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonle.config.cores import num_cores
from tonle.models.cpu.memory import aligned
from tonle.models.cpu.products import compiled
from tonle.models.cpu.vector import I64, LINE

_SPINS = 1500  # looks at the counter before a thread goes to sleep; 15 microseconds (Zen 5) to 60 (Intel), by how long a pause is

# Where the kernel has no futex, waiting threads offer the processor to others. That is slow beside other programs, as whoever
# yields loses its turn for milliseconds; who sleeps is woken at once.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None  # the system call
_WAIT, _WAKE = 128, 129  # its operations, within one process
_EVERYBODY = 2**31 - 1
_ARRIVED, _ASLEEP = 0, 1  # places in the counter


def _place(context: Any, builder: Any, signature: Any, args: Any, place: int) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [ir.Constant(I64, place)])


def _futex(builder: Any, address: Any, operation: int, value: Any) -> Any:
    """What the call returns, int64; -1 if the kernel refuses, or need not wait."""
    nothing = ir.Constant(I64, 0)
    words = [ir.Constant(I64, _FUTEX), builder.ptrtoint(address, I64), ir.Constant(I64, operation), value]
    kind = ir.FunctionType(I64, [I64] * 7)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    return builder.call(syscall, [*words, nothing, nothing, nothing])


def _yield(builder: Any) -> None:
    kind = ir.FunctionType(ir.IntType(32), [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typingctx: Any, counter: Any) -> Any:
    """One more has arrived, as one indivisible operation; how many have."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature, args, _ARRIVED)
        return builder.add(builder.atomic_rmw("add", place, ir.Constant(I64, 1), "seq_cst"), ir.Constant(I64, 1))

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _arrived(typingctx: Any, counter: Any) -> Any:
    """How many have, seeing what those threads wrote before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args, _ARRIVED), "acquire", 8)

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typingctx: Any) -> Any:
    """Tell the processor that we spin."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        elif platform.machine() in ("aarch64", "arm64"):
            builder.asm(ir.FunctionType(ir.VoidType(), []), "isb", "", [], True)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _sleep(typingctx: Any, counter: Any, seen: Any) -> Any:
    """Until `_wake_all`, unless the count of arrivals is another than `seen`. May return for no reason."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _FUTEX is None:
            _yield(builder)
        else:
            arrivals, asleep = (_place(context, builder, signature, args, place) for place in (_ARRIVED, _ASLEEP))
            builder.atomic_rmw("add", asleep, ir.Constant(I64, 1), "seq_cst")
            # The kernel compares the lower half of the count with what was seen, and looks no further.
            result = _futex(builder, arrivals, _WAIT, builder.and_(args[1], ir.Constant(I64, 2**32 - 1)))
            builder.atomic_rmw("sub", asleep, ir.Constant(I64, 1), "seq_cst")
            is_same = builder.icmp_signed("==", builder.load_atomic(arrivals, "seq_cst", 8), args[1])
            with builder.if_then(builder.and_(is_same, builder.icmp_signed("!=", result, ir.Constant(I64, 0)))):
                _yield(builder)  # nobody arrived meanwhile: a sandbox forbids the call
        return context.get_dummy_value()

    return types.void(counter, seen), generate


@intrinsic  # type: ignore[untyped-decorator]
def _wake_all(typingctx: Any, counter: Any) -> Any:
    """Whoever sleeps. For the last one who arrives."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _FUTEX is not None:
            arrivals, asleep = (_place(context, builder, signature, args, place) for place in (_ARRIVED, _ASLEEP))
            some = builder.icmp_signed(">", builder.load_atomic(asleep, "seq_cst", 8), ir.Constant(I64, 0))
            with builder.if_then(some, likely=False):
                _futex(builder, arrivals, _WAKE, ir.Constant(I64, _EVERYBODY))
        return context.get_dummy_value()

    return types.void(counter), generate


@compiled
def barrier(counter: Any, arrivals: Any, size: Any) -> Any:
    """Wait for the other threads. `arrivals`: what the last barrier returned, 0 before the first."""
    target = arrivals + size
    if _arrive(counter) == target:
        _wake_all(counter)
        return target
    spins = 0
    while True:
        seen = _arrived(counter)
        if seen >= target:
            return target
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _sleep(counter, seen)


class _Orders:
    """What a team and its helpers share. The helpers hold no more than this, so that an unused team can be freed.

    Simple queues: a garbage collection may dismiss the helpers inside any call of theirs, where a semaphore's lock could
    be held already.
    """

    def __init__(self, num_helpers: int) -> None:
        self.work: list[SimpleQueue[Callable[[int], None] | None]] = [SimpleQueue() for _ in range(num_helpers)]
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()  # what each piece of work ended with

    def help(self, member: int) -> None:
        while (work := self.work[member - 1].get()) is not None:
            error: BaseException | None = None
            try:
                work(member)
            except BaseException as raised:
                error = raised
            del work  # it holds weights and cache
            self.done.put(error)
            del error

    def dismiss(self) -> None:
        for work in self.work:
            work.put(None)


class Team:
    """`size` threads: the caller and its helpers. Helpers sleep between calls, and end when the team is freed."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or num_cores()
        self.counter = aligned((LINE // 8,), np.dtype(np.int64))  # a cache line of its own
        self._orders = _Orders(self.size - 1)
        self._one_at_a_time = threading.Lock()  # two calls would count at the same barrier, and wait for ever
        for member in range(1, self.size):
            name = f"tonle-cpu-{member}"
            threading.Thread(target=self._orders.help, args=(member,), name=name, daemon=True).start()
        # Not at the interpreter's exit: another thread may still be in `run`, and wait for its helpers.
        weakref.finalize(self, self._orders.dismiss).atexit = False

    def run(self, work: Callable[[int], None]) -> None:
        """`work(member)` on every thread at once; returns when all are done."""
        orders = self._orders
        with self._one_at_a_time:
            self.counter[:] = 0
            for queue in orders.work:
                queue.put(work)
            try:
                work(0)
            finally:
                errors = [orders.done.get() for _ in orders.work]
        for error in errors:
            if error is not None:
                raise error
