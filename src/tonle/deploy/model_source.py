"""Where a server finds its model on platforms that bring none to it: on the hub, on a claim, or at a path.

Does: read `model` and `storage_uri`, refuse what the platform cannot read, with what to do. Does not: fetch anything; KServe,
which brings models, reads `Workload.storage_uri`.
"""

from __future__ import annotations

from tonle.deploy.model_size import is_path
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError


def hub_model(workload: Workload, platform: str, *, instead: str) -> str | None:
    """A hub name, or None for the default model. `instead`: what else the platform can read. Raises `ConfigError`."""
    uri = workload.deploy.storage_uri
    if uri is None:
        return workload.model
    scheme, _, name = uri.partition("://")
    if scheme != "hf" or ":" in name:
        raise ConfigError(
            f"storage_uri: {uri} cannot be read by {platform}; use hf://org/name without a revision, or {instead}",
            param="storage_uri",
        )
    return name


def claim(workload: Workload) -> tuple[str, str] | None:
    """Name and path of pvc://NAME/PATH. Several replicas read it, so that it must allow ReadOnlyMany or ReadWriteMany."""
    uri = workload.deploy.storage_uri
    if uri is None or not uri.startswith("pvc://"):
        return None
    name, _, path = uri.removeprefix("pvc://").partition("/")
    return name, path.strip("/")


def absolute_path(workload: Workload, why: str) -> str | None:
    """Of a model on the machine that is to serve it; None: it is not a path. Raises `ConfigError`."""
    model = workload.serve.model
    if workload.deploy.storage_uri is not None or model is None or not is_path(model):
        return None
    if not model.startswith("/"):
        raise ConfigError(f"model: {model} must be an absolute path: {why}", param="model")
    return model
