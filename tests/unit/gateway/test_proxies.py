"""Whose word on a caller's address is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.config import values
from tonle.edge.exchange import Exchange
from tonle.gateway.proxies import Proxies

BOTH = ("10.0.0.0/8", "fd00::/8")


def placed(peer: str, value: str, *, networks: tuple[str, ...] = BOTH, header: str = "x-forwarded-for") -> Exchange:
    line: Any = None
    exchange = Exchange(line, client=peer, loopback=peer.startswith("127."))
    exchange.headers[header] = value
    Proxies(networks, header).place(exchange)
    return exchange


@pytest.mark.parametrize(
    ("peer", "value", "client"),
    [
        ("10.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", "203.0.113.7, 10.0.0.9", "203.0.113.7"),  # two of ours
        ("10.0.0.1", "1.2.3.4, 203.0.113.7, 10.0.0.9", "203.0.113.7"),  # the caller said 1.2.3.4
        ("203.0.113.9", "1.2.3.4", "203.0.113.9"),  # a stranger's word
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.2"),  # all are ours: the first of them asks
        ("10.0.0.1", "1.2.3.4, unknown", "10.0.0.1"),  # no trusted proxy says who is behind it
        ("10.0.0.1", "203.0.113.7:5000", "203.0.113.7"),
        ("fd00::1", "[2001:db8::7]:5000, fd00::2", "2001:db8::7"),
        ("::ffff:10.0.0.1", "203.0.113.7", "203.0.113.7"),
    ],
)
def test_the_first_address_that_is_no_proxy_of_ours(peer: str, value: str, client: str) -> None:
    assert placed(peer, value).client == client


def test_nobody_is_trusted_unless_named() -> None:
    assert placed("127.0.0.1", "1.2.3.4", networks=()).client == "127.0.0.1"


@pytest.mark.parametrize(
    ("value", "client"),
    [
        ("for=203.0.113.7;proto=http;by=10.0.0.1", "203.0.113.7"),
        ('for=1.2.3.4, For="[2001:db8::7]:4711"', "2001:db8::7"),
        ("for=203.0.113.7, for=_hidden", "10.0.0.1"),
        ("proto=https", "10.0.0.1"),
    ],
)
def test_the_other_header(value: str, client: str) -> None:
    assert placed("10.0.0.1", value, header="forwarded").client == client


def test_a_proxy_on_this_machine_does_not_make_its_callers_local() -> None:
    assert placed("127.0.0.1", "203.0.113.7", networks=("127.0.0.1",)).loopback is False
    assert placed("127.0.0.1", "127.0.0.1", networks=("127.0.0.1",)).loopback is True


def test_networks_are_checked_when_they_are_read() -> None:
    assert values.networks().read("10.0.0.0/8, ::1") == ("10.0.0.0/8", "::1")
    with pytest.raises(ValueError, match=r"must be addresses or networks such as 10.0.0.0/8, not '10.0.0.1/8'"):
        values.networks().read(["10.0.0.1/8"])


@pytest.mark.parametrize(
    ("peer", "header", "value", "is_https"),
    [
        ("10.0.0.1", "x-forwarded-for", "https", True),
        ("10.0.0.1", "x-forwarded-for", "HTTPS, http", True),  # the first proxy talks to the browser
        ("10.0.0.1", "x-forwarded-for", "http", False),
        ("10.0.0.1", "x-forwarded-for", "", False),
        ("203.0.113.9", "x-forwarded-for", "https", False),  # a stranger's word
        ("10.0.0.1", "forwarded", 'for=203.0.113.7;proto="https"', True),
        ("10.0.0.1", "forwarded", "for=203.0.113.7; Proto=https, for=10.0.0.2;proto=http", True),
        ("10.0.0.1", "forwarded", "for=203.0.113.7;proto=http", False),
        ("10.0.0.1", "forwarded", "for=203.0.113.7;xproto=https", False),
    ],
)
def test_whether_the_caller_used_https(peer: str, header: str, value: str, is_https: bool) -> None:
    line: Any = None
    exchange = Exchange(line, client=peer, loopback=False)
    exchange.headers["x-forwarded-proto" if header == "x-forwarded-for" else header] = value
    Proxies(BOTH, header).place(exchange)
    assert exchange.forwarded_https is is_https
    assert Exchange(line, client=peer, loopback=False).forwarded_https is False
