"""What `tonle serve` prints when it is ready: the model, the address, who may call it, and a command to paste."""

from __future__ import annotations

import ipaddress
import json
import logging
import shlex
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonle import __version__
from tonle.cli import screen
from tonle.edge.listening import EVERYWHERE, local_url, url_of

if TYPE_CHECKING:
    from tonle.config.serve import ServeConfig
    from tonle.engine.messages import ModelCard

log = logging.getLogger("tonle.cli")

_GGML_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_ADAPTERS = 8  # named; of more, only the number is told
_KEY_HEADER = '-H "Authorization: Bearer $TONLE_API_KEY"'  # a variable: the key itself stays off screens and logs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Where clients connect, and what they need for it."""

    host: str  # as bound
    port: int
    tls: bool = False
    has_keys: bool = False
    can_log_in: bool = True  # some key may see the dashboard, or can be created
    dashboard: bool = True  # it is served
    frontends: int = 1
    audit_dir: str | None = None
    workers: tuple[str, ...] = ()  # kinds of the pools beside the model
    adapters: tuple[str, ...] = ()  # names of those given at the start
    enable_lora: bool = False

    @classmethod
    def of(cls, listener: socket.socket, settings: ServeConfig) -> ServerInfo:
        host, port = listener.getsockname()[:2]
        return cls(
            host=host,
            port=port,
            tls=settings.ssl_certfile is not None,
            has_keys=bool(settings.api_key or settings.admin_key),
            can_log_in=bool(settings.admin_key or settings.state_db),
            dashboard=settings.dashboard,
            frontends=settings.frontends,
            audit_dir=settings.audit_dir,
            workers=tuple(pool.kind for pool in settings.workers),
            adapters=tuple(name for name, _ in settings.lora),
            enable_lora=settings.enable_lora,
        )

    @property
    def url(self) -> str:
        """For a program on this machine."""
        return local_url(self.host, self.port, tls=self.tls)

    @property
    def is_open(self) -> bool:
        """Other machines can reach the server, and need no key."""
        return not self.has_keys and not ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    @property
    def address(self) -> str:
        """As bound; if that is every interface, also the address that works on this machine."""
        if self.host not in EVERYWHERE:
            return f"{self.url}/v1"
        return f"{url_of(self.host, self.port, tls=self.tls)}/v1, on every network interface; on this machine {self.url}/v1"

    @property
    def keys(self) -> str:
        if self.has_keys:
            return "required, as a bearer token"
        return "none: anyone who can reach the port may use it" if self.is_open else "none: this machine only"

    @property
    def dashboard_fact(self) -> str | None:
        """None: this server has none."""
        if not self.dashboard or self.frontends > 1:
            return None
        is_closed = self.is_open or (self.has_keys and not self.can_log_in)
        return dashboard_line(self.url, has_keys=self.has_keys, is_closed=is_closed)

    @property
    def lora(self) -> str | None:
        """The adapters, and who may load more; None if this server has nothing to do with adapters."""
        if not self.adapters and not self.enable_lora:
            return None
        names, num_more = ", ".join(self.adapters[:_MAX_ADAPTERS]), len(self.adapters) - _MAX_ADAPTERS
        more = f" and {num_more} more" if num_more > 0 else ""
        has = f"adapter{'s' if len(self.adapters) > 1 else ''} {names}{more}" if names else "no adapters yet"
        if self.has_keys:
            return f"{has}; keys with scope admin may load and remove adapters"
        return f"{has}; every caller may load and remove adapters" if self.enable_lora else has


def dashboard_line(url: str, *, has_keys: bool, is_closed: bool) -> str:
    """Where it is, and for whom."""
    if is_closed:
        return "closed: give --admin-key KEY, which opens it"
    return f"{url}/dashboard{', for keys of scope admin or dashboard' if has_keys else ''}"


def warn_if_open(server: ServerInfo, *, frontends: int) -> None:
    """Warn rather than refuse: listening everywhere is right in a container behind a gateway, and wrong on a laptop."""
    if not server.is_open:
        return
    own_key = "" if frontends > 1 else "Give --api-key, or "  # --api-key does not work with several front ends
    advice = f"{own_key}{'let' if own_key else 'Let'} only `tonle gateway` reach it, or listen on 127.0.0.1"
    log.warning(
        "%s is open to the network and no API key is needed: anyone who reaches port %d can use this server. %s",
        server.host, server.port, advice,
    )  # fmt: skip


def weights(card: ModelCard) -> str:
    kept = _GGML_FLOATS.get(card.stored, card.stored)
    made = f"quantized to {card.quantized_to}, " if card.quantized_to else ""
    if not kept:
        return f"random, {made}{card.dtype} on {card.device}"
    if kept == card.dtype and not made:
        return f"{kept} on {card.device}"
    return f"{kept} in the file, {made}computed in {card.dtype} on {card.device}"


def banner(name: str, card: ModelCard, server: ServerInfo, took_s: float, *, chats: bool) -> str:
    """What the user wants to know first, and a command to paste."""
    from rich.markup import escape

    kept_in = f" in {card.kv_dtype}" if card.kv_dtype else ""
    facts = {
        "Model": f"{name} ({card.architecture})",
        "Weights": weights(card),
        "Context": f"{card.context_length} tokens",
        "KV cache": f"{card.num_blocks * card.block_size} tokens{kept_in}, up to {card.max_num_seqs} requests at once",
        "API": server.address,
        "Docs": f"{server.url}/docs",
        "Keys": server.keys,
        "Audit": server.audit_dir or "off",
    }
    if server.dashboard_fact is not None:
        facts["Dashboard"] = server.dashboard_fact
    if server.lora is not None:
        facts["LoRA"] = server.lora
    if server.workers:
        facts["Workers"] = ", ".join(server.workers)
    lines = [f"\n[bold green]Tonle {__version__} is ready[/bold green] after {screen.duration(took_s)}\n"]
    lines += [f"  [dim]{label:<9}[/dim] {escape(fact)}" for label, fact in facts.items()]
    how = "Try it, with a key in TONLE_API_KEY:" if server.has_keys else "Try it:"
    return "\n".join([*lines, f"\n  [dim]{how}[/dim]", f"  {escape(_curl(name, server, chats=chats))}\n"])


def _curl(name: str, server: ServerInfo, *, chats: bool) -> str:
    path, body = "/v1/completions", {"model": name, "prompt": "The capital of Cambodia is", "max_tokens": 16}
    if chats:
        question = {"role": "user", "content": "What is the capital of Cambodia?"}
        path, body = "/v1/chat/completions", {"model": name, "messages": [question]}
    headers = ["-H 'Content-Type: application/json'", *([_KEY_HEADER] if server.has_keys else [])]
    return " ".join([f"curl {server.url}{path}", *headers, "-d", shlex.quote(json.dumps(body))])
