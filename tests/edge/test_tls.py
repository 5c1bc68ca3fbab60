"""HTTPS: real handshakes between our server and Python's own client, and what is said of files that will not do."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.unit.edge.certificates import Authority, Pair
from tonle.cli.banner import ServerInfo
from tonle.config.gateway import GatewayConfig
from tonle.config.serve import ServeConfig
from tonle.config.server import ServerConfig
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url, run, tls_context, url_of
from tonle.edge.server import HttpServer, ServerLimits
from tonle.errors import ConfigError

DEADLINE_S = 120.0
LARGE = b"x" * 3_000_000  # many TLS records, more than a socket holds

ResultT = TypeVar("ResultT")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(ca: Authority) -> Pair:
    return ca.issue("server")


def settings(pair: Pair, **more: Any) -> ServeConfig:
    config = ServeConfig(ssl_certfile=str(pair.cert), ssl_keyfile=str(pair.key), **more)
    config.validate()
    return config


def client_context(ca: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.cert))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def while_serving(config: ServerConfig, work: Callable[[int], ResultT]) -> ResultT:
    """What `work`, in a thread, gets from a server on the port it is given."""

    async def handle(exchange: Exchange) -> None:
        exchange.reply(LARGE if exchange.path == "/large" else exchange.body or b"hello", content_type="text/plain")

    async def main() -> ResultT:
        server = HttpServer(handle, ServerLimits())
        listener = bind("127.0.0.1", 0)
        await server.start(listener, tls=tls_context(config))
        try:
            return await asyncio.wait_for(asyncio.to_thread(work, listener.getsockname()[1]), DEADLINE_S)
        finally:
            await server.stop(drain_s=0)

    return run(main())


def connect(port: int, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=DEADLINE_S)


def get(port: int, context: ssl.SSLContext, path: str = "/") -> bytes:
    connection = connect(port, context)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_requests_over_one_connection(ca: Authority, pair: Pair) -> None:
    def work(port: int) -> tuple[list[bytes], str | None, str | None]:
        connection = connect(port, client_context(ca))
        bodies = []
        for path, body in (("/", b"one"), ("/", LARGE), ("/large", None)):
            connection.request("POST", path, body)
            bodies.append(connection.getresponse().read())
        line: Any = connection.sock
        spoken = bodies, line.version(), line.selected_alpn_protocol()
        connection.close()
        return spoken

    bodies, version, protocol = while_serving(settings(pair), work)
    assert bodies == [b"one", LARGE, LARGE]
    assert version in ("TLSv1.2", "TLSv1.3") and protocol == "http/1.1"


def test_old_versions_are_not_spoken(pair: Pair) -> None:
    context = tls_context(settings(pair))
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_plain_http_gets_no_answer_and_harms_no_other_caller(ca: Authority, pair: Pair) -> None:
    def work(port: int) -> tuple[bytes, bytes]:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            try:
                answer = plain.recv(100)
            except ConnectionError:
                answer = b""
        return answer, get(port, client_context(ca))

    answer, body = while_serving(settings(pair), work)
    assert not answer.startswith(b"HTTP") and body == b"hello"


def test_without_a_certificate_it_is_plain_http() -> None:
    assert tls_context(ServeConfig()) is None


def test_an_encrypted_key(ca: Authority) -> None:
    locked = ca.issue("locked", password=b"open sesame")
    config = settings(locked, ssl_keyfile_password="open sesame")
    assert while_serving(config, lambda port: get(port, client_context(ca))) == b"hello"
    for password, said in ((None, "is encrypted: set ssl_keyfile_password"), ("hush", "check ssl_keyfile_password")):
        with pytest.raises(ConfigError, match=said) as refused:
            tls_context(settings(locked, ssl_keyfile_password=password))
        assert "hush" not in refused.value.message and refused.value.param == "ssl_keyfile_password"


def test_client_certificates(ca: Authority, pair: Pair, tmp_path: Path) -> None:
    friend, stranger = ca.issue("friend"), Authority(tmp_path, "other").issue("stranger")

    def let_in(config: ServeConfig, who: Pair | None) -> bool:
        def work(port: int) -> bool:
            try:
                return get(port, client_context(ca, who)) == b"hello"
            except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
                return False

        return while_serving(config, work)

    required = settings(pair, ssl_ca_certs=str(ca.cert), ssl_cert_reqs=2)
    checked = settings(pair, ssl_ca_certs=str(ca.cert), ssl_cert_reqs=1)
    assert [let_in(required, who) for who in (friend, None, stranger)] == [True, False, False]
    assert [let_in(checked, who) for who in (friend, None, stranger)] == [True, True, False]


def test_a_key_of_another_certificate(ca: Authority, pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"the private key in .*other.key does not belong to the certificate in"):
        tls_context(settings(Pair(pair.cert, ca.issue("other").key)))


def test_files_that_are_not_pem(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("hello")
    for wrong in (Pair(tmp_path / "note", pair.key), Pair(pair.cert, tmp_path / "note")):
        with pytest.raises(ConfigError, match=r"cannot use the certificate in .*note.*Both must be PEM files"):
            tls_context(settings(wrong))
    with pytest.raises(ConfigError, match=r"ssl_ca_certs: cannot read certificates from .*note"):
        tls_context(settings(pair, ssl_ca_certs=str(tmp_path / "note"), ssl_cert_reqs=2))


@pytest.mark.parametrize("config", [ServeConfig, GatewayConfig])
@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"ssl_certfile": "PEM"}, "ssl_keyfile", "ssl_certfile is set but ssl_keyfile is not"),
        ({"ssl_keyfile": "PEM"}, "ssl_certfile", "ssl_keyfile is set but ssl_certfile is not"),
        ({"ssl_keyfile_password": "x"}, "ssl_keyfile_password", "ssl_certfile and ssl_keyfile are not"),
        ({"ssl_ca_certs": "PEM"}, "ssl_ca_certs", "ssl_certfile and ssl_keyfile are not"),
        ({"ssl_certfile": "PEM", "ssl_keyfile": "PEM", "ssl_ca_certs": "PEM"}, "ssl_cert_reqs", "set it to 2"),
        ({"ssl_certfile": "PEM", "ssl_keyfile": "PEM", "ssl_cert_reqs": 2}, "ssl_ca_certs", "which CAs to trust"),
        ({"ssl_certfile": "PEM", "ssl_keyfile": "/gone.key"}, "ssl_keyfile", "there is no file /gone.key"),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, config: type[ServeConfig | GatewayConfig], given: dict[str, Any], param: str, said: str
) -> None:
    pem = tmp_path / "pem"
    pem.touch()
    with pytest.raises(ConfigError, match=said) as refused:
        config(**{name: str(pem) if value == "PEM" else value for name, value in given.items()}).validate()
    assert refused.value.param == param


def test_urls() -> None:
    assert url_of("10.0.0.1", 1, tls=True) == "https://10.0.0.1:1" and url_of("10.0.0.1", 1) == "http://10.0.0.1:1"
    assert local_url("::", 1, tls=True) == "https://[::1]:1"
    server = ServerInfo(host="0.0.0.0", port=1, tls=True)
    assert server.url == "https://127.0.0.1:1" and server.address.startswith("https://0.0.0.0:1/v1")
