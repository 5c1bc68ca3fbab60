"""How Prometheus finds the pods' metrics: annotations, or a PodMonitor for the Prometheus operator.

Does: those, and refuse what could not be read. Does not: say which metrics there are (`telemetry/`).
"""

from __future__ import annotations

from tonle.deploy.document import Document
from tonle.deploy.pod import API_KEY_ENTRY, metadata
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError


def scrape_annotations(workload: Workload, port: int) -> dict[str, str]:
    """Of pods, for a Prometheus that looks for them; none where a PodMonitor does the same."""
    if workload.deploy.pod_monitor:
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def pod_monitors(workload: Workload, selected: dict[str, str]) -> list[Document]:
    """For the pods with the labels `selected`, whose port is called http; empty unless asked for."""
    if not workload.deploy.pod_monitor:
        return []
    endpoint: Document = {"port": "http", "path": "/metrics", "interval": "15s"}
    if workload.is_ours and workload.deploy.api_key_secret is not None:
        credentials = {"name": workload.deploy.api_key_secret, "key": API_KEY_ENTRY}
        endpoint["authorization"] = {"type": "Bearer", "credentials": credentials}
    spec = {"selector": {"matchLabels": selected}, "podMetricsEndpoints": [endpoint]}
    made = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(workload),
        "spec": spec,
    }
    return [made]


def check_router(workload: Workload, kind: str) -> None:
    """Raises `ConfigError` if llm-d's router could not read our metrics."""
    if workload.is_ours and workload.deploy.api_key_secret is not None:
        raise ConfigError(
            f"api_key_secret does not work with {kind}: llm-d's router reads /metrics without a key. Ask for keys at the "
            "Gateway, or put `tonle gateway` in front of it",
            param="api_key_secret",
        )


def check_metrics(workload: Workload) -> None:
    """Raises `ConfigError` if an autoscaler would see nothing: our /metrics asks for the key, too."""
    deploy = workload.deploy
    if workload.is_ours and deploy.api_key_secret and deploy.autoscaler != "none" and not deploy.pod_monitor:
        raise ConfigError(
            "with api_key_secret, /metrics needs the key, and a Prometheus that follows annotations does not send it: no "
            "replica would ever be added. Set pod_monitor: true (the Prometheus operator sends the key), or autoscaler: none",
            param="api_key_secret",
        )
