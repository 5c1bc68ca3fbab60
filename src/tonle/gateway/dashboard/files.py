"""`StaticFiles`: the files of the page, read once when the server is built.

Does: hold each file with its type and ETag, in a table by name. Does not: open a file for a request, so no name can lead out of
the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from tonle.edge.exchange import Exchange

INDEX = "index.html"
# Of the types that browsers are strict about. Others are not served.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
# The browser asks each time whether its copy is the current one: after an upgrade no old script meets a new server.
CACHING = ("cache-control", "no-cache")


class StaticFile(NamedTuple):
    body: bytes
    content_type: str
    etag: str

    def reply(self, exchange: Exchange) -> None:
        headers = [CACHING, ("etag", self.etag)]
        known = [tag.strip().removeprefix("W/") for tag in exchange.header("if-none-match").split(",")]
        if self.etag in known:
            exchange.reply(b"", status=304, headers=headers)
        else:
            exchange.reply(self.body, content_type=self.content_type, headers=headers)


class StaticFiles:
    def __init__(self, folder: Traversable | None = None) -> None:
        """Those of the package, unless another folder is given."""
        folder = folder or resources.files(__package__).joinpath("static")
        self._files = dict(_files(folder, "")) if folder.is_dir() else {}

    def get(self, name: str) -> StaticFile | None:
        """By its path below the folder, such as vendor/preact.js."""
        return self._files.get(name)


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, StaticFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
            continue
        content_type = TYPES.get("." + entry.name.rpartition(".")[2])
        if content_type is not None:
            body = entry.read_bytes()
            yield f"{prefix}{entry.name}", StaticFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
