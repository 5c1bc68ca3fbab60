"""`hub_model`: what a server that fetches its own model is told to serve, on platforms that bring no models to it.

Does: read `storage_uri` where it names a hub model, refuse the rest with what to do. Does not: fetch anything.
"""

from __future__ import annotations

from tonle.deploy.workload import Workload
from tonle.errors import ConfigError


def hub_model(workload: Workload, platform: str, *, instead: str) -> str | None:
    """A hub name, or None for the default model. `instead`: what to do with a model from elsewhere. Raises `ConfigError`."""
    uri = workload.deploy.storage_uri
    if uri is None:
        return workload.serve.model
    scheme, _, name = uri.partition("://")
    if scheme != "hf" or not name:
        raise ConfigError(
            f"storage_uri: {uri} cannot be read by {platform}; use hf://org/name, or {instead}", param="storage_uri"
        )
    return name
