"""The operator's own command, run for one replica.

Does: fill in the replica's name and address, pass its output on, end it with all its children after a time. Does not: know what
it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal

from tonle.child.spawn import code_reason
from tonle.errors import CallerError, ConfigError

_END_S = 5.0  # between a request to end and the kill


def filled(template: str, *, name: str, url: str) -> str:
    """`{name}` and `{url}` replaced, quoted for a shell. Raises `ConfigError` for any other name in braces."""
    try:
        return template.format(name=shlex.quote(name), url=shlex.quote(url))
    except (LookupError, ValueError, AttributeError, TypeError):
        raise ConfigError(
            f"{template!r}: only {{name}} and {{url}} can be filled in; write a brace of the shell twice: {{{{ }}}}"
        ) from None


async def run(command: str, *, within_s: float) -> None:
    """In a shell, with the output of this process. Raises `CallerError` unless it ends with 0 in time."""
    process = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    try:
        async with asyncio.timeout(within_s):
            code = await process.wait()
    except TimeoutError:
        await _end(process)
        raise CallerError(f"`{command}` did not end within {within_s:g} s; see --command-timeout") from None
    except BaseException:
        await _end(process)
        raise
    if code != 0:
        raise CallerError(f"`{command}` failed: {code_reason(code)}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
