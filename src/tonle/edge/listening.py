"""An address to listen on, its URL, its TLS, and the event loop to run on: what server and gateway share.

Does: bind and load certificates with errors that say what to do, name the address, raise the limit of open files, run on
uvloop where there is one. Does not: serve.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tonle.child.open_files import raise_limit
from tonle.config.server import ServerConfig
from tonle.errors import ConfigError

log = logging.getLogger("tonle.edge")

OTHER_FILES = 64  # open files besides connections: records, databases, pipes
MIN_CONNECTIONS = 16
# Per connection, that the kernel holds of what a caller has sent and we have not read. It would grow to 6 MB: memory that no
# limit of ours counts, and that has to be read to the end of a body that was refused.
RECEIVE_BUFFER_BYTES = 256 * 1024
BACKLOG = 2048  # connections the kernel holds before we accept them
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # every interface, and what this machine's own programs call it

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def bind(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Claim the address, before anything slow is begun. Port 0 takes a free one. Raises `ConfigError`.

    With `share`, more sockets of this user may be bound to it with `share`: the kernel deals out connections.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: ports go from 0 to 65535. Check --port.", param="port"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"cannot listen on {host}: there is no such address. Check --host.", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    listener.setblocking(False)
    return listener


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        why = "another program is using it. Stop that, or choose another port with --port"
    elif error.errno == errno.EACCES:
        why = "ports below 1024 need more rights. Choose another port with --port"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address. Choose another with --host"
    else:
        why = f"{error.strerror}. Check --host and --port"
    return ConfigError(f"cannot listen on {host}, port {port}: {why}.", param="port")


def most_connections(wanted: int) -> int:
    """As many as `wanted`, or as the open files of this process allow: for each caller two, its connection and one to a
    backend. A process without a free one could not write its records either."""
    files = raise_limit()
    if files >= 2 * wanted + OTHER_FILES:
        return wanted
    allowed = max(MIN_CONNECTIONS, int(files - OTHER_FILES) // 2)
    log.warning(
        "at most %d connections instead of %d: this process may open %d files (ulimit -n)", allowed, wanted, files
    )
    return allowed


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Where a program on this machine reaches it."""
    return url_of(EVERYWHERE.get(host, host), port, tls=tls)


def tls_context(settings: ServerConfig) -> ssl.SSLContext | None:
    """What the listener speaks TLS with: 1.2 or newer, HTTP/1.1 inside. None: plain HTTP. Raises `ConfigError`."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    certfile, keyfile = (str(Path(file).expanduser()) for file in (settings.ssl_certfile, settings.ssl_keyfile))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    asked = False  # without a password of ours OpenSSL would ask for one on the terminal

    def password() -> str:
        nonlocal asked
        asked = True
        return settings.ssl_keyfile_password or ""

    try:
        context.load_cert_chain(certfile, keyfile, password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise _tls_error(settings, error, asked=asked) from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(str(Path(settings.ssl_ca_certs).expanduser()))
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"ssl_ca_certs: cannot read certificates from {settings.ssl_ca_certs}: {_reason(error)}",
                param="ssl_ca_certs",
            ) from None
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def _tls_error(settings: ServerConfig, error: Exception, *, asked: bool) -> ConfigError:
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return ConfigError(
            f"the private key in {keyfile} does not belong to the certificate in {certfile}. Where the certificate file "
            "holds a chain, the server's own certificate must come first",
            param="ssl_keyfile",
        )
    if asked:
        problem = (
            "is encrypted: set ssl_keyfile_password"
            if not settings.ssl_keyfile_password
            else ("cannot be decrypted: check ssl_keyfile_password")
        )
        return ConfigError(f"the private key in {keyfile} {problem}", param="ssl_keyfile_password")
    return ConfigError(
        f"cannot use the certificate in {certfile} with the private key in {keyfile}: {_reason(error)}. Both must be PEM "
        "files that this user can read",
        param="ssl_certfile",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").replace("_", " ").lower()
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
