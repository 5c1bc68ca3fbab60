"""The same bytes to our server and to h11: the two must agree on what is a request, or ours must be the stricter one."""

from __future__ import annotations

import re

import h11
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.edge.running_server import Reply, replies
from tests.edge.wire import Wire, feed
from tonle.edge.exchange import CONTINUE

MARK = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
MAX_REQUESTS = 20

# Where h11 and llhttp, our parser, differ. Each was looked at and is safe:
# - h11 takes a bare LF for a line end, folds obs-fold, takes any token for a method and any bytes for a target, `3, 3` or `3`
#   twice for a Content-Length, both Content-Length and Transfer-Encoding, Transfer-Encoding in HTTP/1.0, spaces after a
#   chunk's size, any Host. We refuse these and close, as RFC 9112 allows (2.2, 5.2, 6.3) or demands (3.2, 6.1, 7.1).
# - llhttp takes several spaces for one in the request line (allowed by section 3), and we keep connections of HTTP/1.0 whose
#   callers ask for it (9.3). `IS_LAXER` names these two.
# - h11 refuses an empty line before a request, which section 2.2 asks servers to skip; `by_h11` skips it.

STARTS = st.sampled_from([b"GET /a HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"HEAD /a HTTP/1.1", b"OPTIONS * HTTP/1.1",
                          b"GET /a HTTP/1.0", b"DELETE http://x/a HTTP/1.1", b"CONNECT x:80 HTTP/1.1"])  # fmt: skip
FRAMED = st.sampled_from([(b"", b""), (b"Content-Length: 3\r\n", b"abc"), (b"Content-Length: 0\r\n", b""),
                          (b"Content-Length: %d\r\n" % len(MARK), MARK),
                          (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
                          (b"Transfer-Encoding: chunked\r\n", b"3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n")])  # fmt: skip
COMMON = st.lists(st.sampled_from([b"A: b\r\n", b"Connection: keep-alive\r\n", b"Connection: close\r\n", b"A:\t\xff \r\n",
                                   b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n"]),
                  max_size=2)  # fmt: skip
ODD_LINES = [b"Content-Length: 3\r\n", b"Content-Length: 35\r\n", b"Content-Length: +3\r\n", b"Content-Length: -3\r\n",
             b"Content-Length: 3, 3\r\n", b"Content-Length: 0x3\r\n", b"Content-Length : 3\r\n", b"Content_Length: 3\r\n",
             b"Content-Length:\r\n 3\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
             b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: xchunked\r\n",
             b"Transfer-Encoding:\x0bchunked\r\n", b"Transfer-Encoding : chunked\r\n", b"Transfer\x00Encoding: chunked\r\n",
             b"Transfer-Encoding: identity, chunked\r\n", b" Transfer-Encoding: chunked\r\n", b"A: b\r\n c\r\n", b"A: b\0\r\n",
             b"A: b\rc\r\n", b"A: b\nc: d\r\n", b"Host: y\r\n", b": a\r\n", b"A\r\n", b"\r\n", b"\n", b"\r"]  # fmt: skip
ODD_PIECES = [
    b"\n",
    b"\r",
    b"\r\n",
    b" ",
    b"  ",
    b"\t",
    b"\0",
    b":",
    b";",
    b"0",
    b"f",
    b"-",
    b"\xff",
    b"HTTP/1.1",
    b"0\r\n\r\n",
]


@st.composite
def raw_requests(draw: st.DrawFn) -> bytes:
    """One to three requests, of which none, one or two places are wrong."""
    lines: list[bytes] = []
    for _ in range(draw(st.integers(1, 2))):
        length, body = draw(FRAMED)
        lines += [draw(STARTS) + b"\r\n", b"Host: x\r\n", *draw(COMMON), length, b"\r\n", body]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        if draw(st.booleans()):
            lines.insert(at, draw(st.sampled_from(ODD_LINES)))
        else:
            line = lines[at]
            cut = draw(st.integers(0, len(line)))
            lines[at] = line[:cut] + draw(st.sampled_from(ODD_PIECES)) + line[cut + draw(st.integers(0, 1)) :]
    return b"".join(lines) + draw(st.sampled_from([b"", MARK]))


def by_h11(data: bytes) -> tuple[list[tuple[bytes, bytes]], str]:
    """Method and body of each request h11 finds, and how it ended: "error", "more" (it waits), or "whole"."""
    found: list[tuple[bytes, bytes]] = []
    for _ in range(MAX_REQUESTS):
        server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        server.receive_data(data.lstrip(b"\r\n"))
        try:
            request, body = server.next_event(), b""
            if not isinstance(request, h11.Request):
                return found, "more" if server.trailing_data[0] else "whole"
            while isinstance(event := server.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                return found, "more"
        except h11.RemoteProtocolError:
            return found, "error"
        found.append((request.method, body))
        server.send(h11.Response(status_code=405, headers=[("content-length", "0")]))
        server.send(h11.EndOfMessage())
        if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
            return found, "whole"  # the connection is to be closed
        data = server.trailing_data[0]
    raise AssertionError("requests without end")


def runs_ahead(data: bytes, num_run: int) -> bool:
    """More requests were run than request lines stand in the bytes."""
    return num_run > data.count(b"HTTP/1.")


TWO_SPACES = rb"[A-Z]+ (?: +\S+ *|\S+  +)HTTP/1\.[01]\r\n"
KEPT_1_0 = rb"HTTP/1\.0\r\n(?:(?!Connection: close)[^\r\n]+\r\n)*Connection: keep-alive\r\n"
IS_LAXER = re.compile(TWO_SPACES + b"|" + KEPT_1_0)


def answers(wire: Wire, *methods: str) -> list[Reply]:
    """What was replied to requests with `methods`, and perhaps to one more that was refused."""
    return replies(b"".join(wire.writes).removesuffix(CONTINUE), *methods, "GET")  # it may wait for a body


def compare(data: bytes, *pieces: bytes) -> str:
    """Raises where we and h11 disagree in a way that is not safe. Returns what it came to."""
    exchanges, wire = feed(*pieces)
    ours = [(exchange.method.encode(), exchange.body) for exchange in exchanges]
    theirs, end = by_h11(data)
    answered = answers(wire, *(method.decode() for method, _ in ours))
    refusals = [reply for reply in answered if reply.status >= 400]
    assert len(answered) == len(ours) + len(refusals), f"{data!r}: {len(answered)} replies to {ours}"
    assert (len(refusals) <= 1 and not refusals) or (answered[-1] is refusals[0] and wire.closed), f"{data!r}: went on"
    assert not runs_ahead(data, len(ours)), f"{data!r}: ran {ours}"
    same = ours[: len(theirs)] == theirs[: len(ours)]
    assert same, f"{data!r}: we ran {ours}, h11 read {theirs}"
    if len(ours) < len(theirs):
        assert wire.closed, f"{data!r}: we wait, h11 read {theirs}"  # refused, or closed by wish of the caller
        return "stricter"
    if len(ours) > len(theirs):
        assert IS_LAXER.search(data), f"{data!r}: we ran {ours}, h11 read {theirs} and then: {end}"
        return "laxer"
    return end


@settings(max_examples=600, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
@given(raw_requests())
def test_we_agree_with_h11_or_are_the_stricter_one(data: bytes) -> None:
    compare(data, data)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(raw_requests(), st.integers(0, 200))
def test_where_the_bytes_are_split_changes_nothing(data: bytes, cut: int) -> None:
    def read(*pieces: bytes) -> tuple[list[tuple[str, str, bytes]], list[int]]:
        exchanges, wire = feed(*pieces)
        asked = [(exchange.method, exchange.path, exchange.body) for exchange in exchanges]
        return asked, [reply.status for reply in answers(wire, *(method for method, _, _ in asked))]

    assert read(data) == read(data[:cut], data[cut:]) == read(*(data[at : at + 1] for at in range(len(data))))


def test_the_mutations_reach_every_kind_of_end() -> None:
    """Else the test above compares nothing."""
    kinds: set[str] = set()

    @settings(max_examples=600, deadline=None, derandomize=True, database=None)
    @given(raw_requests())
    def collect(data: bytes) -> None:
        kinds.add(compare(data, data))

    collect()
    assert {"error", "whole", "more", "stricter"} <= kinds
