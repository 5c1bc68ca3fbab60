"""Settings of discovery: where a gateway looks for backends that come and go.

Does: give each kind of source a type, read the short form of the flag, say how the Kubernetes API is reached from inside a pod.
Does not: look for backends (`gateway/discovery/`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tonle.config.routing import BackendConfig, read_object, read_yaml
from tonle.config.values import ValueType
from tonle.errors import ConfigError

_WANTED = "a source of backends such as {kubernetes: {service: my-model}} or {file: {path: backends.yaml}}"
_SHORT = "kubernetes:NAMESPACE/SERVICE:PORT, file:PATH or http://HOST:PORT/PATH"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes puts a pod's credentials
_OWN_FIELDS = ("url", "name")  # of a backend: its source finds them

DnsName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.\-]{0,251}[a-z0-9])?$")]


class FileDiscovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A YAML or JSON file with a list of backends, read again when it changes."""

    path: Annotated[str, Meta(min_length=1)]
    interval_s: Annotated[float, Meta(gt=0)] = 1.0  # between two looks at the file


class KubernetesDiscovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ready pods behind a Service."""

    service: DnsName
    namespace: DnsName | None = None  # default: the pod's own
    port: Annotated[int, Meta(ge=1, le=65535)] | Annotated[str, Meta(min_length=1)] | None = (
        None  # default: the only one
    )
    scheme: Literal["http", "https"] = "http"
    backend: dict[str, Any] = {}  # what each of them has in common: fields of a backend, without url and name
    role_label: str = "llm-d.ai/role"  # of a pod: prefill, decode or both
    api_server: str | None = None  # default: of the cluster that the gateway runs in
    token_file: str | None = None
    ca_file: str | None = None


class HttpDiscovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that lists backends in the form of that file, such as the controller of `tonle ray`."""

    url: Annotated[str, Meta(pattern=r"^https?://[^/\s]+")]
    interval_s: Annotated[float, Meta(gt=0)] = 1.0  # between two questions
    backend: dict[str, Any] = {}  # what each of them has in common, over what the list says


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source. Exactly one of its fields is set."""

    file: FileDiscovery | None = None
    http: HttpDiscovery | None = None
    kubernetes: KubernetesDiscovery | None = None


class KubernetesAccess(msgspec.Struct, frozen=True):
    """How the API server is reached."""

    url: str
    namespace: str
    token_file: Path
    ca_file: Path | None  # None: authorities this machine trusts


def discovery_sources() -> ValueType:
    """One source or a list of them; in text: YAML, or the short form."""

    def read(value: object) -> tuple[DiscoveryConfig, ...]:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_source(item) for item in items)

    return ValueType("SOURCE", read, lambda sources: "" if not sources else str(len(sources)))


def backend_of(fields: Mapping[str, Any], **found: Any) -> BackendConfig:
    """A backend with the fields that all of a source have in common, and what was `found` of this one."""
    return read_object({**fields, **found}, BackendConfig, "a discovered backend")


def kubernetes_access(wanted: KubernetesDiscovery, environ: Mapping[str, str] | None = None) -> KubernetesAccess:
    """From the settings, else from what Kubernetes gives to every pod. Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    url = wanted.api_server
    if url is None:
        if not host:
            raise ConfigError(
                "discovery: this is not a pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set): run the gateway in the "
                "cluster, or set api_server, token_file and namespace",
                param="discovery",
            )
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    token_file = Path(wanted.token_file or _ACCOUNT / "token").expanduser()
    ca_file = Path(wanted.ca_file).expanduser() if wanted.ca_file else _ACCOUNT / "ca.crt"
    if wanted.ca_file is None and wanted.api_server is not None and not ca_file.exists():
        return KubernetesAccess(url, _namespace(wanted), token_file, None)
    return KubernetesAccess(url, _namespace(wanted), token_file, ca_file)


def _namespace(wanted: KubernetesDiscovery) -> str:
    if wanted.namespace is not None:
        return wanted.namespace
    try:
        return (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            "discovery: set namespace, the one of the Service: this pod does not say its own", param="discovery"
        ) from None


def _source(item: object) -> DiscoveryConfig:
    if isinstance(item, DiscoveryConfig):
        return item
    if isinstance(item, str):
        item = read_yaml(item) if item.lstrip().startswith("{") else _short(item)
    found = read_object(item, DiscoveryConfig, f"must be {_WANTED}: it")
    if sum(getattr(found, name) is not None for name in found.__struct_fields__) != 1:
        raise ValueError(f"must be {_WANTED}: give one kind of source in each entry")
    for each in (found.kubernetes, found.http):
        if each is not None:
            _check_fields(each.backend)
    return found


def _check_fields(fields: dict[str, Any]) -> None:
    for name in _OWN_FIELDS:
        if name in fields:
            raise ValueError(f"must not set {name} in backend: it is found for each backend")
    read_object({"url": "http://found", **fields}, BackendConfig, "must have fields of a backend in backend: it")


def _short(text: str) -> dict[str, Any]:
    kind, _, rest = text.partition(":")
    if kind in ("http", "https"):
        return {"http": {"url": text}}
    if kind == "file" and rest:
        return {"file": {"path": rest}}
    if kind == "kubernetes" and rest:
        place, _, port = rest.partition(":")
        namespace, _, service = place.rpartition("/")
        found: dict[str, Any] = {"service": service}
        found |= {"namespace": namespace} if namespace else {}
        return {"kubernetes": found | ({"port": int(port) if port.isdigit() else port} if port else {})}
    raise ValueError(f"must be {_SHORT}, or YAML: {_WANTED}, not {text!r}")
