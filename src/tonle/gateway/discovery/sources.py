"""The sources that the settings ask for.

Does: make one of each. Does not: import what only one kind needs unless it is asked for.
"""

from __future__ import annotations

from tonle.config.discovery import DiscoveryConfig
from tonle.gateway.discovery.source import Source


def source_of(wanted: DiscoveryConfig) -> Source:
    """Raises `ConfigError`."""
    if wanted.file is not None:
        from tonle.gateway.discovery.file_source import FileSource

        return FileSource(wanted.file)
    if wanted.http is not None:
        from tonle.gateway.discovery.http_source import HttpSource

        return HttpSource(wanted.http)
    assert wanted.kubernetes is not None
    from tonle.gateway.discovery.kubernetes_source import KubernetesSource

    return KubernetesSource(wanted.kubernetes)
