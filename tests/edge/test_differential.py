"""The same bytes to our server and to h11: the two must agree on what is a request, or ours must be the stricter one."""

from __future__ import annotations

import h11
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.edge.running_server import replies
from tests.edge.wire import feed

MARK = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
MAX_REQUESTS = 20

# h11 is laxer or stricter than llhttp here; each was looked at and is safe:
# - h11 takes a bare LF for a line end, folds obs-fold, takes any token for a method, `3, 3` and `3` twice for a
#   Content-Length, a comma or space before `chunked`, spaces around a chunk's size, and control characters in targets.
#   We refuse all of these with a 4xx or 501 and close: RFC 9112 allows it (2.2, 5.2, 6.3) or demands it (6.1, 7.1).
# - llhttp takes two spaces for one between the parts of the request line (RFC 9112, section 3, allows it), LF alone for
#   an empty line before a request (2.2), and obs-text in a chunk's extension. All leave the framing as it is: what is run is
#   what stands in the bytes, and `runs_ahead` below holds it to that.

METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"get", b"FOO", b"G T", b"", b"CONNECT"])
TARGETS = st.sampled_from(
    [b"/a", b"/a?b=c", b"*", b"http://x/a", b"/a b", b"/%00", b"/\xff", b"", b"/a\t", b"x:80", b"//"]
)
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.1 ", b""])
ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n"])
SPACES = st.sampled_from([b" "] * 12 + [b"  ", b"\t", b"", b"\x0b"])
NAMES = st.sampled_from([b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"A", b"Upgrade",
                         b"content-length ", b" Host", b"Content_Length", b"Transfer\x00Encoding", b"", b"\xe9"])  # fmt: skip
VALUES = st.sampled_from([b"x", b"0", b"3", b"+3", b"-3", b"3, 3", b"0x3", b"35", b"chunked", b"identity", b"chunked, identity",
                          b"identity, chunked", b"xchunked", b"chunked ", b"close", b"keep-alive", b"upgrade", b"h2c",
                          b"100-continue", b"a\x00b", b"a\rb", b"a\nb", b"a\r\n b", b"a\xff", b"", b" 3"])  # fmt: skip
HEADERS = st.lists(st.tuples(NAMES, SPACES, VALUES, ENDS), max_size=4)
BODIES = st.sampled_from([b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n", b"0\r\n\r\n",
                          b"3\nabc\n0\n\n",
                          b"3\r\nabcd\r\n0\r\n\r\n", b"ffffffffffffffff\r\nabc", b" 3\r\nabc\r\n0\r\n\r\n", b"0\r\n", b"-1\r\n",
                          b"3\r\nabc\r\n0\r\nContent-Length: 35\r\n\r\n", b"\r\n", b"\n", b"0\r\n\r\nx"])  # fmt: skip
LENGTHS = st.sampled_from([b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\n",
                           b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"])  # fmt: skip


@st.composite
def raw_requests(draw: st.DrawFn) -> bytes:
    start = draw(METHODS) + draw(SPACES) + draw(TARGETS) + draw(SPACES) + draw(VERSIONS) + draw(ENDS)
    simple = draw(st.sampled_from([b"GET /a HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\n", None]))
    host = draw(st.sampled_from([b"Host: x\r\n"] * 8 + [b"", b"Host: x\r\nHost: y\r\n"]))
    headers = b"".join(name + b":" + space + value + end for name, space, value, end in draw(HEADERS))
    data = (simple or start) + host + draw(LENGTHS) + headers + draw(ENDS) + draw(BODIES)
    for _ in range(draw(st.integers(0, 2)) if draw(st.booleans()) else 0):  # and a byte or two changed
        at = draw(st.integers(0, len(data)))
        data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + draw(st.integers(0, 1)) :]
    return data + draw(st.sampled_from([b"", MARK]))


def by_h11(data: bytes) -> tuple[list[tuple[bytes, bytes]], str]:
    """Method and body of each request h11 finds, and how it ended: "error", "more" (it waits), or "whole"."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    server.receive_data(data)
    found: list[tuple[bytes, bytes]] = []
    try:
        for _ in range(MAX_REQUESTS):
            if isinstance(request := server.next_event(), h11.Request):
                body = b""
                while isinstance(event := server.next_event(), h11.Data):
                    body += event.data
                if not isinstance(event, h11.EndOfMessage):
                    return found, "more"
                found.append((request.method, body))
                if server.our_state is h11.SEND_RESPONSE:
                    server.send(h11.Response(status_code=204, headers=[]))
                    server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                    return found, "whole"  # the connection is to be closed
                server.start_next_cycle()
            else:
                return found, "more" if server.trailing_data[0] else "whole"
    except h11.RemoteProtocolError:
        return found, "error"
    raise AssertionError("requests without end")


def runs_ahead(data: bytes, num_run: int) -> bool:
    """More requests were run than request lines stand in the bytes."""
    return num_run > data.count(b"HTTP/1.")


def compare(data: bytes, *pieces: bytes) -> str:
    """Raises where we and h11 disagree in a way that is not safe. Returns what it came to."""
    exchanges, wire = feed(*pieces)
    ours = [(exchange.method.encode(), exchange.body) for exchange in exchanges]
    theirs, end = by_h11(data)
    answered = replies(b"".join(wire.writes), *(method.decode() for method, _ in ours), "GET")
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
        assert LAX(data), f"{data!r}: we ran {ours}, h11 read {theirs} and then: {end}"
        return "laxer"
    return end


def LAX(data: bytes) -> bool:
    """Holds one of the things that llhttp takes and h11 does not; see above."""
    return b"  " in data or data.startswith(b"\n") or b"\n\n" in data


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
        return asked, [
            reply.status for reply in replies(b"".join(wire.writes), *(method for method, _, _ in asked), "GET")
        ]

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
