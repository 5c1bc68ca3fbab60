"""How requests are framed and what is refused: RFC 9112 and 9110, section by section, over raw sockets."""

from __future__ import annotations

import pytest

from tests.edge.running_server import RunningServer, read_to_end, replies, running_server, until
from tests.edge.wire import feed
from tonle.edge.reader import MAX_HEAD_BYTES, MAX_HEADERS

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED: dict[str, tuple[bytes, int]] = {
    "2.2 bare LF": (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
    "2.2 bare CR in a value": (GET + b"A: b\rc\r\n\r\n", 400),
    "2.2 bare LF in a value": (GET + b"A: b\nc: d\r\n\r\n", 400),
    "2.2 space before the method": (b" " + GET + b"\r\n", 400),
    "2.2 CR alone ends the head": (GET + b"A: b\r\n\r" + SMUGGLED, 400),
    "2.3 HTTP/0.9": (b"GET /a HTTP/0.9\r\n\r\n", 505),
    "2.3 HTTP/2.0": (b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "2.3 HTTP/1.2": (b"GET /a HTTP/1.2\r\nHost: x\r\n\r\n", 400),
    "2.3 lower case": (b"GET /a http/1.1\r\nHost: x\r\n\r\n", 400),
    "2.3 preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "3 nonsense": (b"nonsense\r\n\r\n", 400),
    "3 a reply": (b"HTTP/1.1 200 OK\r\n\r\n", 400),
    "3 TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, 400),
    "3 tabs": (b"GET\t/a\tHTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3 unknown method": (b"FOO /a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 no Host": (b"GET /a HTTP/1.1\r\n\r\n", 400),
    "3.2 two Hosts": (GET + b"Host: y\r\n\r\n", 400),
    "3.2 the same Host twice": (GET + b"Host: x\r\n\r\n", 400),
    "3.2 Host that is none": (b"GET /a HTTP/1.1\r\nHost: x/y\r\n\r\n", 400),
    "3.2 two Hosts in HTTP/1.0": (b"GET /a HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    "3.2 space in the target": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 byte in the target": (b"GET /a\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 control in the target": (b"GET /a\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 authority-form": (b"GET y:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 another scheme": (b"GET ftp://y/a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "3.2 another protocol": (b"OPTIONS rtsp://x/a RTSP/1.0\r\n\r\n", 400),
    "5.1 space before the colon": (GET + b"A : b\r\n\r\n", 400),
    "5.1 space in the name": (GET + b"A b: c\r\n\r\n", 400),
    "5.1 no name": (GET + b": c\r\n\r\n", 400),
    "5.1 no colon": (GET + b"A\r\n\r\n", 400),
    "5.1 space before the first header": (b"GET /a HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "5.2 obs-fold": (GET + b"A: b\r\n c\r\n\r\n", 400),
    "5.5 NUL": (GET + b"A: b\0c\r\n\r\n", 400),
    "5.5 control": (GET + b"A: b\x01c\r\n\r\n", 400),
    "5.5 DEL": (GET + b"A: b\x7fc\r\n\r\n", 400),
    "5.5 NUL in the name": (GET + b"A\0: b\r\n\r\n", 400),
    "6.1 Transfer-Encoding in HTTP/1.0": (
        b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    "6.1 Content-Length, Transfer-Encoding": (
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    "6.1 Transfer-Encoding, Content-Length": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    "6.1 Content-Length, identity": (
        POST + b"Content-Length: 3\r\nTransfer-Encoding: identity\r\n\r\nabc" + SMUGGLED, 400),
    "6.1 chunked twice": (
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    "6.1 identity, then chunked": (
        POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 501),
    "7.1 chunk size with a space": (CHUNKED + b"1 \r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 chunk size 0x1": (CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 chunk size +1": (CHUNKED + b"+1\r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 chunk size -1": (CHUNKED + b"-1\r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 no chunk size": (CHUNKED + b"\r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 chunk size of 17 digits": (CHUNKED + b"f" * 17 + b"\r\nx" + SMUGGLED, 400),
    "7.1 chunk longer than its size": (CHUNKED + b"1\r\nxx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1 chunk without an end": (CHUNKED + b"1\r\nx0\r\n\r\n" + SMUGGLED, 400),
    "7.1 bare LF after the size": (CHUNKED + b"1\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1.1 bare LF in an extension": (CHUNKED + b"1;a\nb\r\nx\r\n0\r\n\r\n" + SMUGGLED, 400),
    "7.1.2 Content-Length as a trailer": (CHUNKED + b"0\r\nContent-Length: 35\r\n\r\n" + SMUGGLED, 400),
    **{f"6.1 Transfer-Encoding: {coding!r}": (
        POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n" + SMUGGLED, status)
       for status, codings in {
           400: [b"chunked, identity", b"chunked, chunked", b"\x0bchunked", b"chunked,", b""],
           501: [b"identity", b"gzip", b"identity, chunked", b"gzip, chunked", b", chunked", b"xchunked", b"chunked x",
                 b"chunked;a=b", b"'chunked'", b"chun\xffked"],
       }.items() for coding in codings},
    **{f"6.2 Content-Length: {value!r}": (POST + b"Content-Length: " + value + b"\r\n\r\nabc" + SMUGGLED, 400)
       for value in (b"+3", b"-3", b"0x3", b"3.0", b"3,3", b"3, 4", b"3 4", b"", b"9" * 30, b"three", b"\xb3", b'"3"')},
    "6.3 Content-Length twice": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" + SMUGGLED, 400),
    "6.3 two Content-Lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc" + SMUGGLED, 400),
    "9110 9.3.6 CONNECT": (b"CONNECT y:80 HTTP/1.1\r\nHost: y:80\r\n\r\n" + SMUGGLED, 501),
    "9110 5.4 head too large": (GET + b"A: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n" + SMUGGLED, 431),
    "9110 5.4 many headers": (GET + b"A: b\r\n" * MAX_HEADERS + b"\r\n" + SMUGGLED, 431),
    "9110 4.1 target too long": (b"GET /" + b"x" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n" + SMUGGLED, 431),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rfc_9112_refused_once_then_closed_and_nothing_after_it_is_run(place: RunningServer, name: str) -> None:
    data, status = REFUSED[name]
    (reply,) = place.ask(data)
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert b"\\" not in reply.body and reply.body.startswith(b'{"error":{"message":"')
    assert place.handler.seen == []


@pytest.mark.parametrize("name", [name for name, (data, _) in REFUSED.items() if len(data) < 400])
def test_rfc_9112_refused_alike_when_it_comes_byte_by_byte(name: str) -> None:
    data, status = REFUSED[name]
    seen, written = fed(*(data[index : index + 1] for index in range(len(data))))
    assert [reply.status for reply in replies(written)] == [status] and not seen


ACCEPTED: dict[str, tuple[bytes, str, bytes]] = {  # what is sent, path, body
    "2.2 empty lines before it": (b"\r\n\r\n" + GET + b"\r\n", "/a", b""),
    "3.2.1 percent-encoding": (b"GET /a%20b%2Fc?d=%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n", "/a b/c", b""),
    "3.2.1 bad percent-encoding": (b"GET /a%zz%ff HTTP/1.1\r\nHost: x\r\n\r\n", "/a%zz\ufffd", b""),
    "3.2.1 dots are not resolved": (b"GET /a/../b/%2e%2e/c HTTP/1.1\r\nHost: x\r\n\r\n", "/a/../b/../c", b""),
    "3.2.2 absolute-form": (b"GET http://y/a?b HTTP/1.1\r\nHost: x\r\n\r\n", "/a", b""),
    "3.2.2 absolute-form without a path": (b"GET HTTP://y:80?b HTTP/1.1\r\nHost: x\r\n\r\n", "/", b""),
    "3.2.2 a URL in the query": (b"GET /a?u=http://y/z HTTP/1.1\r\nHost: x\r\n\r\n", "/a", b""),
    "3.2.4 asterisk-form": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "*", b""),
    "3.2 empty Host": (b"GET /a HTTP/1.1\r\nHost:\r\n\r\n", "/a", b""),
    "3.2 no Host in HTTP/1.0": (b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "/a", b""),
    "5.1 no space after the colon": (POST + b"Content-Length:3\r\n\r\nabc", "/a", b"abc"),
    "5.1 spaces around the value": (POST + b"Content-Length: \t 3 \t \r\n\r\nabc", "/a", b"abc"),
    "5.5 obs-text": (GET + b"A: \xff\xfe\r\n\r\n", "/a", b""),
    "6.3 leading zeros": (POST + b"Content-Length: 003\r\n\r\nabc", "/a", b"abc"),
    "6.3 body of a GET": (GET + b"Content-Length: 3\r\n\r\nabc", "/a", b"abc"),
    "7 any case": (POST + b"transfer-encoding: CHUNKED\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "/a", b"abc"),
    "7.1 hexadecimal": (CHUNKED + b"00A\r\n0123456789\r\n0\r\n\r\n", "/a", b"0123456789"),
    "7.1.1 extensions": (CHUNKED + b'2;a;b=c;d="e;f"\r\nab\r\n1\r\nc\r\n0;g\r\n\r\n', "/a", b"abc"),
    "7.1.2 trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nA: b\r\nHost: y\r\n\r\n", "/a", b"abc"),
    "9110 7.8 h2c": (
        POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        b"Content-Length: 3\r\n\r\nabc", "/a", b"abc"),
    "9110 7.8 h2c, chunked": (
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nA: b\r\n\r\n",
        "/a", b"abc"),
    "9110 7.8 websocket": (
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n", "/a", b""),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_rfc_9112_accepted_and_the_connection_goes_on(place: RunningServer, name: str) -> None:
    data, path, body = ACCEPTED[name]
    first, last = place.ask(data + LAST)
    assert (first.status, last.status) == (200, 200)
    assert [(exchange.path, exchange.body) for exchange in place.handler.seen] == [(path, body), ("/last", b"")]


@pytest.mark.parametrize("name", ACCEPTED)
def test_rfc_9112_accepted_alike_wherever_it_is_split(name: str) -> None:
    data, path, body = ACCEPTED[name]
    for cut in range(len(data) + 1):
        seen, written = fed(data[:cut], data[cut:] + LAST)
        assert seen == [(path, body), ("/last", b"")], data[:cut]
        assert len(replies(written)) == 2
    seen, _ = fed(*(data[index : index + 1] for index in range(len(data))), LAST)
    assert seen == [(path, body), ("/last", b"")]


def test_one_byte_per_packet_over_a_socket(place: RunningServer) -> None:
    with place.connect() as caller:
        for byte in CHUNKED + b"3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n" + LAST:
            caller.sendall(bytes([byte]))
        assert [reply.body for reply in replies(read_to_end(caller))] == [b"/a abc", b"/last "]


def test_rfc_9112_7_1_2_trailers_override_no_header(place: RunningServer) -> None:
    head = POST + b"Authorization: mine\r\nTransfer-Encoding: chunked\r\n\r\n"
    place.ask(head + b"1\r\nx\r\n0\r\nAuthorization: forged\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n" + LAST)
    headers = place.handler.seen[0].headers
    assert headers["authorization"] == "mine" and "x-forwarded-for" not in headers


def test_rfc_9112_3_2_2_the_host_of_an_absolute_target_counts(place: RunningServer) -> None:
    place.ask(b"GET http://me@y:80/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert place.handler.seen[0].header("host") == "y:80"


def test_values_lose_their_surrounding_spaces_and_repeated_ones_are_joined(place: RunningServer) -> None:
    place.ask(GET + b"A: \t b \t \r\nA:c\r\nConnection: close\r\n\r\n")
    assert place.handler.seen[0].header("a") == "b, c"


@pytest.mark.parametrize(
    "start",
    [b"GET /a HTTP/1.1\r\nA: ", b"GET /", b"GET /a HTTP/1.1\r\n" + b"A", CHUNKED + b"1\r\nx\r\n0\r\nA: ",
     CHUNKED + b"1;", CHUNKED + b"1;a=", CHUNKED + b"0" * 16],
    ids=["value", "target", "name", "trailer", "extension name", "extension value", "chunk size"],
)  # fmt: skip
def test_a_line_that_never_ends_is_refused(place: RunningServer, start: bytes) -> None:
    (reply,) = place.ask(start + b"0" * (3 * MAX_HEAD_BYTES))
    assert reply.status in (400, 431) and place.handler.seen == []


def test_heads_of_the_largest_size_are_read(place: RunningServer) -> None:
    (reply,) = place.ask(GET + b"Connection: close\r\nA: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
    assert reply.status == 200


def test_trailers_without_end_are_refused(place: RunningServer) -> None:
    (reply,) = place.ask(CHUNKED + b"0\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES)
    assert reply.status == 431 and place.handler.seen == []


# -- Expect


def test_rfc_9110_10_1_1_the_body_is_asked_for(place: RunningServer) -> None:
    with place.connect() as caller:
        caller.sendall(POST + b"Connection: close\r\nContent-Length: 3\r\nExpect: 100-Continue\r\n\r\n")
        assert caller.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        caller.sendall(b"abc")
        assert replies(read_to_end(caller))[0].body == b"/a abc"


def test_rfc_9110_10_1_1_no_body_no_100(place: RunningServer) -> None:
    first, _ = place.ask(GET + b"Expect: 100-continue\r\n\r\n" + LAST)
    assert first.interim == []


def test_rfc_9110_10_1_1_not_in_http_1_0(place: RunningServer) -> None:
    (reply,) = place.ask(b"POST /a HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc")
    assert (reply.interim, reply.body) == ([], b"/a abc")


def test_rfc_9110_10_1_1_a_body_too_large_is_refused_instead() -> None:
    with running_server(max_body_bytes=1000) as place:
        head = POST + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
        (reply,) = place.ask(head)
        assert (reply.status, reply.interim, reply.headers["connection"]) == (413, [], "close")
        (reply,) = place.ask(head + b"x" * 1001 + SMUGGLED)  # sent all the same
        assert reply.status == 413 and "/smuggled" not in place.handler.paths


def test_rfc_9110_10_1_1_the_body_is_asked_for_when_the_answer_before_has_ended(place: RunningServer) -> None:
    with place.connect() as caller:
        caller.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: place.handler.paths == ["/wait"], "it was not begun")
        caller.sendall(POST + b"Connection: close\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        (connection,) = place.call(lambda: [each for each in place.server.connections if not each.idle])
        until(lambda: place.call(lambda: connection._reader.continue_asked), "the second head was not read")
        place.handler.gate.set()
        received = b""
        while not received.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            piece = caller.recv(65536)
            assert piece
            received += piece
        caller.sendall(b"abc")
        first, second = replies(received + read_to_end(caller))
        assert (first.interim, second.interim, second.body) == ([], [100], b"/a abc")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_read_and_refused(*, chunked: bool) -> None:
    with running_server(max_body_bytes=1000) as place:
        body = b"x" * 3_000_000
        plain = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        data = CHUNKED + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n" if chunked else plain
        (reply,) = place.ask(data + SMUGGLED)
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert place.handler.paths == ["/a"] and place.handler.seen[0].body == b""


def test_a_refusal_reaches_a_caller_who_still_sends(place: RunningServer) -> None:
    """RFC 9112, section 9.6: closing at once would reset the connection, and the reset overtakes the reply."""
    for _ in range(5):
        with place.connect() as caller:
            caller.sendall(b"nonsense\r\n\r\n" + b"x" * 5_000_000)  # raises if it is reset
            assert [reply.status for reply in replies(read_to_end(caller))] == [400]


def fed(*pieces: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """What a connection makes of bytes that come in these pieces: paths and bodies, and what it wrote."""
    exchanges, wire = feed(*pieces)
    return [(exchange.path, exchange.body) for exchange in exchanges], b"".join(wire.writes)
