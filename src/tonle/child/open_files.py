"""How many files and sockets a process may have open, and what to do when it has them all.

Does: raise the limit as far as a process may, put "too many open files" into words that help. Does not: count.
"""

from __future__ import annotations

import contextlib
import errno
import math

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_MOST = 1 << 20  # beyond that, programs that close all descriptors one by one take long to start


def raise_limit() -> float:
    """To as many as the system lets this process and its children have. Each caller's connection is one. Returns how many that
    are, infinity where there is no limit. Harmless if repeated."""
    if resource is None:
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def is_too_many(error: BaseException | None) -> bool:
    """Whether it, or what led to it, is a lack of descriptors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TOO_MANY:
            return True
        error = error.__cause__ or error.__context__
    return False


def describe(error: BaseException) -> str:
    """The error in words, with what to do if it is a lack of descriptors."""
    if not is_too_many(error):
        return str(error) or type(error).__name__
    allowed = "" if resource is None else f" (this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return (
        f"Too many open files{allowed}. Raise the limit: `ulimit -n 65536` in the shell that starts Tonle, or LimitNOFILE=65536 "
        "in a systemd unit"
    )
