"""EndpointSlices of a Service as backends: what Kubernetes says of each endpoint, and which of them should get requests.

Does: read the documents, choose port and address, name backends after their pods. Does not: fetch (`kubernetes_source.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tonle.config.discovery import KubernetesDiscovery
from tonle.gateway.discovery.source import SourceLost

_FAMILIES = ("IPv4", "IPv6")  # the first that a pod has is used; FQDN slices have no pods behind them


class Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    labels: dict[str, str] | None = None


class Conditions(msgspec.Struct, frozen=True):
    """None means unknown, which counts as ready and not terminating: the API says so."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""

    @property
    def key(self) -> str:
        """Of this very pod: of a StatefulSet, the next has the same name."""
        return self.uid or self.name


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    conditions: Conditions | None = None
    target: TargetRef | None = msgspec.field(default=None, name="targetRef")

    @property
    def is_wanted(self) -> bool:
        said = self.conditions or Conditions()
        return said.ready is not False and not said.terminating and bool(self.addresses)

    @property
    def pod(self) -> TargetRef | None:
        return self.target if self.target is not None and self.target.kind == "Pod" else None


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, frozen=True):
    metadata: Metadata
    family: str = msgspec.field(default="IPv4", name="addressType")
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class Found(msgspec.Struct, frozen=True):
    """An endpoint that should get requests."""

    name: str  # of its pod; without one, its address
    url: str
    pod: TargetRef | None


def found_in(slices: Iterable[EndpointSlice], wanted: KubernetesDiscovery) -> list[Found]:
    """By name. One that is in several slices, of two families or while it moves between them, is found once."""
    found: dict[str, Found] = {}
    ordered = sorted(slices, key=lambda each: (each.family, each.metadata.name))
    for each in ordered:
        ready = [endpoint for endpoint in each.endpoints or () if endpoint.is_wanted]
        if each.family not in _FAMILIES or not ready:
            continue
        port = _port(each, wanted)
        for endpoint in ready:
            address = endpoint.addresses[0]
            host = f"[{address}]" if ":" in address else address
            name = endpoint.pod.name if endpoint.pod is not None else f"{address}:{port}"
            found.setdefault(name, Found(name, f"{wanted.scheme}://{host}:{port}", endpoint.pod))
    return [found[name] for name in sorted(found)]


def _port(each: EndpointSlice, wanted: KubernetesDiscovery) -> int:
    """Raises `SourceLost` if it is not clear which."""
    if isinstance(wanted.port, int):
        return wanted.port
    ports = [port for port in each.ports or () if port.port is not None]
    matching = [port for port in ports if wanted.port in (None, port.name)]
    if len(matching) == 1 and matching[0].port is not None:
        return matching[0].port
    names = ", ".join(f"{port.name or 'unnamed'} ({port.port})" for port in ports) or "none"
    asked = "set port to the one that the API is at" if wanted.port is None else f"there is no one port {wanted.port!r}"
    raise SourceLost(f"Service {wanted.service}: {asked}; its ports are: {names}")
