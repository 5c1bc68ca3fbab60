"""What RFC 9112 asks of a request's head beyond its grammar, which llhttp checks.

Does: find the fault of a head that must be refused before its body is read, take a target apart. Does not: parse.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

_HOST = re.compile(r"[^\s/?#@\\]*")  # a name or address, and perhaps a port; may be empty

Fault = tuple[int, str]  # status, and why


def head_fault(method: str, version: str, headers: dict[str, str], target: str, *, num_hosts: int) -> Fault | None:
    """None: nothing is wrong with it. Names in `headers` are in lower case."""
    if version not in ("1.0", "1.1"):
        return 505, f"HTTP/{version} is not spoken here: send HTTP/1.1"
    if method == "CONNECT":  # what follows it is no request
        return 501, "this server is not a proxy: it has no CONNECT"
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if version == "1.0":  # section 6.1: a proxy that forwarded it may have read another length
            return 400, "HTTP/1.0 has no Transfer-Encoding"
        if coding.lower() != "chunked":  # we would take a compressed body for the body itself
            return 501, "the only Transfer-Encoding understood is chunked"
    if num_hosts > 1 or (version == "1.1" and not num_hosts):  # section 3.2
        return 400, "send exactly one Host header"
    if num_hosts and not _HOST.fullmatch(headers["host"]):
        return 400, "the Host header is not a host"
    if "://" in target and not target.startswith("/") and absolute_target(target) is None:
        return 400, "the request's target is not a path or an http URL"
    return None


def absolute_target(target: str) -> tuple[str, str, str] | None:
    """Host, path and query of a whole URL, as a proxy's caller sends it. None: not one of HTTP."""
    try:
        url = urlsplit(target)
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or not url.netloc:
        return None
    return url.netloc.rpartition("@")[2], decoded(url.path) or "/", url.query


def decoded(path: str) -> str:
    return unquote(path) if "%" in path else path
