"""A socket's address as a URL."""

from __future__ import annotations

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # every interface, and what this machine's own programs call it


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url(host: str, port: int) -> str:
    """Where a program on this machine reaches it."""
    return url_of(EVERYWHERE.get(host, host), port)
