"""Replies as parsers that are not ours read them: h11, http.client, curl. Order, framing, and what headers may hold."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.edge.running_server import WAIT_S, RunningServer, read_to_end, replies, running_server
from tests.unit.edge.certificates import Authority
from tonle.edge.connection import MAX_PIPELINED
from tonle.edge.exchange import Exchange

LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
DATA = b"".join(b"data: %d\n\n" % index for index in range(5)) + b"data: [DONE]\n\n"


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


# -- order


@pytest.mark.parametrize("num_requests", [2, MAX_PIPELINED, MAX_PIPELINED + 1, 500])
def test_rfc_9112_9_3_2_pipelined_requests_are_answered_in_order(place: RunningServer, num_requests: int) -> None:
    found = place.ask(b"".join(get(f"/{index}") for index in range(num_requests)) + LAST)
    paths = [f"/{index}" for index in range(num_requests)] + ["/last"]
    assert [reply.body.decode().strip() for reply in found] == paths == place.handler.paths


def test_pipelined_streams_and_bodies_keep_their_order(place: RunningServer) -> None:
    post = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000
    found = place.ask((get("/stream") + post) * 6 + LAST)
    assert [reply.body for reply in found] == [DATA, b"/b " + b"x" * 70_000] * 6 + [b"/last "]


def test_a_handler_that_fails_in_the_middle_fails_alone(place: RunningServer) -> None:
    found = place.ask(get("/1") + get("/2") + get("/fail") + get("/4") + LAST)
    assert [reply.status for reply in found] == [200, 200, 500, 200, 200]
    assert b'"message":"' in found[2].body


def test_what_came_before_a_fault_is_answered_and_what_comes_after_is_not(place: RunningServer) -> None:
    found = place.ask(get("/1") + get("/stream") + b"nonsense\r\n\r\n" + LAST)
    assert [reply.status for reply in found] == [200, 200, 400]
    assert found[1].body == DATA and place.handler.paths == ["/1", "/stream"]


def test_rfc_9112_9_6_nothing_is_run_after_connection_close(place: RunningServer) -> None:
    (reply,) = place.ask(LAST + get("/smuggled") + b"nonsense")
    assert (reply.body, place.handler.paths) == (b"/last ", ["/last"])


def test_a_reply_broken_off_does_not_look_whole(place: RunningServer) -> None:
    received = place.send(get("/break") + get("/after"))
    assert b"data: 4" in received and b"\r\n0\r\n\r\n" not in received
    assert place.handler.paths == ["/break"]
    with pytest.raises(Exception, match="peer closed connection"):
        replies(received)


# -- versions


def test_rfc_9112_9_3_http_1_0_closes_unless_asked(place: RunningServer) -> None:
    (reply,) = place.ask(get("/1", version="1.0") + get("/2", version="1.0"))
    assert (reply.body, reply.headers["connection"]) == (b"/1 ", "close")
    keep = get("/1", "Connection: keep-alive", version="1.0")
    first, last = place.ask(keep + get("/2", version="1.0"))
    assert (first.headers["connection"], last.headers["connection"]) == ("keep-alive", "close")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("options", [["keep-alive, Close"], ["close", "keep-alive"], ["keep-alive", "close"]])
def test_rfc_9112_9_3_close_wins_over_keep_alive(place: RunningServer, version: str, options: list[str]) -> None:
    head = get("/1", *(f"Connection: {option}" for option in options), version=version)
    (reply,) = place.ask(head + get("/smuggled"))
    assert (reply.headers["connection"], place.handler.paths) == ("close", ["/1"])


def test_rfc_9112_6_1_http_1_0_gets_no_chunks(place: RunningServer) -> None:
    (reply,) = place.ask(get("/stream", "Connection: keep-alive", version="1.0") + get("/2", version="1.0"))
    assert "transfer-encoding" not in reply.headers and reply.headers["connection"] == "close"
    assert reply.body == DATA


def test_chunked_replies_are_whole(place: RunningServer) -> None:
    first, _ = place.ask(get("/stream") + LAST)
    assert (first.headers["transfer-encoding"], first.body) == ("chunked", DATA)


# -- no body


@pytest.mark.parametrize("path", ["/a", "/stream", "/large"])
def test_rfc_9110_9_3_2_head_has_the_headers_and_no_body(place: RunningServer, path: str) -> None:
    head, whole, _ = place.ask(get(path, method="HEAD") + get(path) + LAST, "HEAD", "GET", "GET")
    assert head.body == b"" and whole.body
    differ = {"x-request-id"}
    assert {**head.headers, **dict.fromkeys(differ)} == {**whole.headers, **dict.fromkeys(differ)}


def test_head_in_http_1_0_has_no_body(place: RunningServer) -> None:
    received = place.send(get("/stream", method="HEAD", version="1.0"))
    assert received.endswith(b"\r\n\r\n") and received.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("status", [204, 304])
def test_rfc_9110_6_4_1_no_body_and_no_length(place: RunningServer, status: int) -> None:
    received = place.send(get(f"/status/{status}") + LAST)
    first, last = replies(received)
    assert (first.status, first.body, last.body) == (status, b"", b"/last ")
    assert not {"content-length", "transfer-encoding", "content-type"} & set(first.headers)


def test_statuses_without_a_name_are_readable(place: RunningServer) -> None:
    first, _ = place.ask(get("/status/599") + LAST)
    assert (first.status, first.body) == (599, b"body")


# -- what headers may hold


@pytest.mark.parametrize("value", ["a%0d%0aSet-Cookie:b", "a\r\nSet-Cookie: b", "a\rb", "a\nb", "\0", "\x7f", "é", "ខ"])
def test_header_values_never_end_a_line(value: str) -> None:
    sent: list[bytes] = []

    class Line:
        full = False

        def send(self, data: bytes) -> None:
            sent.append(data)

        def finish(self, exchange: Exchange) -> None: ...

        async def drained(self) -> None: ...

        retiring = False

        def ends_with(self, exchange: Exchange) -> bool:
            raise AssertionError

    exchange = Exchange(Line(), client="", loopback=True)
    exchange.method = "GET"
    exchange.headers["x-request-id"] = value
    exchange.extra_headers.append(("x-extra", value))
    exchange.reply(b"", content_type=f"text/{value}", headers=[("x-value", value), (f"x-name{value}", "v")])
    lines = b"".join(sent).split(b"\r\n")
    names = [line.partition(b":")[0].partition(b"x-name")[0] for line in lines[1:-2]]
    expected = [b"content-type", b"x-request-id", b"x-value", b"", b"x-extra", b"content-length"]
    assert names == expected and lines[-2:] == [b"", b""]
    assert not any(byte < 32 or byte == 127 for line in lines for byte in line)


@pytest.mark.parametrize("theirs", ["a b", "a\tb", "é", "x" * 129, "<script>", '"', "a,b", ".", ".."])
def test_request_ids_that_are_none_are_replaced(place: RunningServer, theirs: str) -> None:
    head = f"GET /a HTTP/1.1\r\nHost: x\r\nX-Request-Id: {theirs}\r\nConnection: close\r\n\r\n"
    (reply,) = place.ask(head.encode())
    assert reply.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("theirs", ["a", "...", ".a", "a-b_c:d.e", "x" * 128])
def test_other_request_ids_are_the_callers(place: RunningServer, theirs: str) -> None:
    head = f"GET /a HTTP/1.1\r\nHost: x\r\nX-Request-Id: {theirs}\r\nConnection: close\r\n\r\n"
    (reply,) = place.ask(head.encode())
    assert reply.headers["x-request-id"] == theirs


def test_line_ends_in_paths_and_bodies_stay_out_of_the_head(place: RunningServer) -> None:
    body = b"a\r\nSet-Cookie: b"
    head = f"POST /header?c=%0d%0aSet-Cookie:d HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    first, second, _ = place.ask(head + body + get("/a%0d%0aSet-Cookie:%20b") + LAST)
    assert (first.headers["x-echo"], first.headers["x-body"]) == ("c=%0d%0aSet-Cookie:d", "a Set-Cookie: b")
    assert "set-cookie" not in {*first.headers, *second.headers}


# -- other clients


def test_http_client_keeps_its_connection(place: RunningServer) -> None:
    client = http.client.HTTPConnection("127.0.0.1", place.port, timeout=WAIT_S)
    asked = [
        ("GET", "/a"),
        ("HEAD", "/a"),
        ("GET", "/stream"),
        ("GET", "/status/204"),
        ("POST", "/b"),
        ("GET", "/large"),
    ]
    socket_of_first = None
    for method, path in asked * 2:
        chunks = iter([b"ab", b"c"]) if method == "POST" else None
        client.request(
            method, path, body=chunks, encode_chunked=True, headers={"Transfer-Encoding": "chunked"} if chunks else {}
        )
        reply = client.getresponse()
        body = reply.read()
        socket_of_first = socket_of_first or client.sock
        assert client.sock is socket_of_first is not None
        if method == "POST":
            assert body == b"/b abc"
    client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(place: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"x" * 2_000_000)  # large enough for curl to ask with Expect
    base, body = f"http://127.0.0.1:{place.port}", f"@{tmp_path / 'body'}"
    command = ["curl", "-sS", "--fail", "-m", str(WAIT_S), "--noproxy", "*"]
    asked = [[f"{base}/a", f"{base}/stream"], ["-I", f"{base}/a"], ["-0", f"{base}/stream"], ["--http2", f"{base}/a"],
             ["--data-binary", body, f"{base}/b"], ["--http2", "--data-binary", body, f"{base}/b"],
             ["-H", "Transfer-Encoding: chunked", "--data-binary", body, f"{base}/b"]]  # fmt: skip
    for arguments in asked:
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=2 * WAIT_S, check=False)
        assert (done.returncode, done.stderr) == (0, b""), arguments
        if "--data-binary" in arguments:
            assert len(done.stdout) == len("/b ") + 2_000_000


def test_tls(loop: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with running_server(loop, tls=context) as place:
        trust = ssl.create_default_context(cafile=str(authority.cert))
        client = http.client.HTTPSConnection("127.0.0.1", place.port, timeout=WAIT_S, context=trust)
        for path, expected in (("/a", b"/a "), ("/stream", DATA), ("/large", b"x" * 4_000_000)):
            client.request("GET", path)
            assert client.getresponse().read() == expected
        client.close()
        with trust.wrap_socket(place.connect(), server_hostname="127.0.0.1") as caller:
            caller.sendall(b"nonsense\r\n\r\n")
            assert replies(read_to_end(caller))[0].status == 400
        place.until_alone()
