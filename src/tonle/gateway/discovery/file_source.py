"""`FileSource`: backends listed in a YAML or JSON file, which any program may write.

Does: read it when it changes, check each entry as the settings file does. Does not: take half of a file: one that cannot be read,
or has a wrong entry, changes nothing. Write it under another name and rename it, so that no half of it is ever seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tonle.config.discovery import FileDiscovery
from tonle.config.routing import BackendConfig, objects
from tonle.gateway.discovery.source import SourceLost

MAX_BYTES = 4 * 1024**2
_ROWS = objects(BackendConfig, "a list of backends, each with at least a url")


class FileSource:
    def __init__(self, wanted: FileDiscovery) -> None:
        self._path = Path(wanted.path).expanduser()
        self._interval_s = wanted.interval_s
        self.name = f"file {wanted.path}"

    async def watch(self) -> AsyncIterator[Sequence[BackendConfig]]:
        before: bytes | None = None
        while True:
            text = await asyncio.to_thread(self._read)
            if text != before:
                yield await asyncio.to_thread(read_rows, text)
                before = text
            await asyncio.sleep(self._interval_s)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise SourceLost(f"{self._path}: {error.strerror}") from None
        if len(text) > MAX_BYTES:
            raise SourceLost(f"{self._path} is larger than {MAX_BYTES} bytes")
        return text


def read_rows(text: bytes) -> tuple[BackendConfig, ...]:
    """Raises `SourceLost`. An empty list removes all backends; an empty file is more likely a mistake."""
    try:
        words = text.decode("utf-8")
        if not words.strip():
            raise SourceLost("it is empty; for no backends, write []")
        rows: tuple[BackendConfig, ...] = _ROWS.read(words)
    except UnicodeDecodeError:
        raise SourceLost("it is not UTF-8 text") from None
    except ValueError as error:
        raise SourceLost(f"it {error}") from None
    return rows
