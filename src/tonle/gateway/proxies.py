"""The caller's address behind trusted proxies, and whether it used HTTPS.

Does: follow the addresses a chain of trusted proxies reports, from the nearest to the first that is not one of them.
Does not: believe a header from any other sender, or trust a proxy that the settings do not name.

Only one header is read, the one the settings name: a proxy that writes X-Forwarded-For may pass a caller's own
Forwarded on untouched, and the other way round.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable

from tonle.edge.exchange import Exchange

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^;\s]+))', re.IGNORECASE)
_PROTO = re.compile(r"(?:^|;)\s*proto\s*=\s*\"?https\b", re.IGNORECASE)
_PORT = re.compile(r"\[(?P<six>[^\]]+)\](?::\d+)?|(?P<four>[^:]+):\d+")
_CACHED = 4096  # addresses whose trust is remembered


class Proxies:
    def __init__(self, networks: Iterable[str], header: str) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._header = header
        self._trusts = functools.lru_cache(_CACHED)(self._is_inside)

    def place(self, exchange: Exchange) -> None:
        """Set the address that the request really comes from."""
        if not self._networks:
            return
        client = _address(exchange.client)
        if client is not None and self._trusts(client):
            exchange.forwarded_https = self._says_https(exchange)
        for hop in reversed(self._hops(exchange.header(self._header))):
            if client is None or not self._trusts(client) or (behind := _address(hop)) is None:
                break
            client = behind
        if client is not None:
            exchange.client = str(client)
            exchange.loopback = client.is_loopback

    def _is_inside(self, address: IpAddress) -> bool:
        return any(address in network for network in self._networks)

    def _says_https(self, exchange: Exchange) -> bool:
        """Of the first proxy, which the caller's browser talks to. A caller that says so itself harms only itself."""
        if self._header == "x-forwarded-for":
            return exchange.header("x-forwarded-proto").partition(",")[0].strip().lower() == "https"
        return _PROTO.search(exchange.header(self._header).partition(",")[0]) is not None

    def _hops(self, value: str) -> list[str]:
        """Nearest last, as both headers have it."""
        hops = [part.strip() for part in value.split(",")] if value else []
        if self._header == "x-forwarded-for":
            return hops
        found = (_FOR.search(hop) for hop in hops)
        return ["" if match is None else match[1] or match[2] or "" for match in found]


def _address(text: str) -> IpAddress | None:
    """Without port and brackets; None for what is no address ("unknown", "_hidden")."""
    if match := _PORT.fullmatch(text):
        text = match["six"] or match["four"]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
