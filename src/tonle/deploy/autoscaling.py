"""What adds and removes replicas: KEDA's ScaledObject, or a HorizontalPodAutoscaler with a rule for prometheus-adapter.

Does: the questions to Prometheus, which are the same for our engine and vLLM (both export vLLM's names). Does not: know
which Deployments there are (`kubernetes.py`, `llm_d.py`).

Finished requests are counted, so that under an overload their rate stops at what the replicas can do: with
`scale_on: requests`, requests that wait are looked at as well, and the larger number of replicas holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from tonle.deploy.document import Document, yaml_text
from tonle.deploy.pod import metadata
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError

_FINISHED = "vllm:request_success_total"
_WAITING = "vllm:num_requests_waiting"
_WINDOW = "2m"  # of a rate: several scrapes
_STEADY_S = 300  # before replicas are removed: a start takes minutes
# Names that prometheus-adapter gives them: a name there has no colon.
_RATE_METRIC, _WAITING_METRIC = "llm_requests_per_second", "llm_requests_waiting"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A Deployment whose number of replicas changes."""

    deployment: str
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Trigger:
    name: str
    query: str  # PromQL: all pods of one Deployment together
    target: str  # per replica


def triggers(workload: Workload, deployment: str, *, model_name: str | None = None) -> list[Trigger]:
    """For the pods of `deployment`. `model_name`: what they call the model, if the platform chooses it."""
    deploy = workload.deploy
    selected = [f"model_name={json.dumps(model_name or workload.model_name)}", f'pod=~"{deployment}-[^-]+-[^-]+"']
    if deploy.namespace is not None:
        selected.insert(0, f'namespace="{deploy.namespace}"')
    pods = "{" + ",".join(selected) + "}"
    waiting = Trigger("waiting", f"sum({_WAITING}{pods})", str(deploy.waiting_requests))
    if deploy.scale_on == "queue":
        return [waiting]
    return [
        Trigger("requests", f"sum(rate({_FINISHED}{pods}[{_WINDOW}]))", f"{deploy.requests_per_second:g}"),
        waiting,
    ]


def autoscalers(workload: Workload, scaled: list[Scaled]) -> list[Document]:
    """As `deploy.autoscaler` says."""
    if workload.deploy.autoscaler == "keda":
        return [scaled_object(workload, each) for each in scaled]
    if workload.deploy.autoscaler == "hpa":
        return [horizontal(workload, each) for each in scaled]
    return []


def replicas(workload: Workload, scaled: Scaled) -> Document:
    """Of a Deployment: none where an autoscaler decides, whose number the next `kubectl apply` must not overwrite."""
    return {"replicas": scaled.least} if workload.deploy.autoscaler == "none" else {}


def check_replicas(workload: Workload) -> None:
    """Raises `ConfigError`."""
    if workload.deploy.min_replicas == 0:
        raise ConfigError(
            "min_replicas: 0 does not work here: pods count the requests that autoscalers look at, so without any pod no "
            "request would start one again; set min_replicas: 1",
            param="min_replicas",
        )


def scaled_object(workload: Workload, scaled: Scaled) -> Document:
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(workload, scaled.deployment),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": scaled.deployment},
            "pollingInterval": 15,
            "minReplicaCount": scaled.least,
            "maxReplicaCount": scaled.most,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior()}},
            "triggers": [
                {
                    "type": "prometheus",
                    "name": each.name,
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": workload.deploy.prometheus_url,
                        "query": each.query,
                        "threshold": each.target,
                        "ignoreNullValues": "false",  # metrics that are missing must not look like no load
                    },
                }
                for each in triggers(workload, scaled.deployment)
            ],
        },
    }


def horizontal(workload: Workload, scaled: Scaled) -> Document:
    metrics = [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": _RATE_METRIC if each.name == "requests" else _WAITING_METRIC},
                "target": {"type": "AverageValue", "averageValue": each.target},
            },
        }
        for each in triggers(workload, scaled.deployment)
    ]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(workload, scaled.deployment),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": scaled.deployment},
            "minReplicas": scaled.least,
            "maxReplicas": scaled.most,
            "metrics": metrics,
            "behavior": behavior(),
        },
    }


def behavior() -> Document:
    """Up at once, down one by one."""
    one_by_one = {"type": "Pods", "value": 1, "periodSeconds": 60}
    return {"scaleDown": {"stabilizationWindowSeconds": _STEADY_S, "policies": [one_by_one]}}


def adapter_values(workload: Workload) -> str:
    """Values for the chart of prometheus-adapter, which gives a HorizontalPodAutoscaler its metrics."""
    address = urlsplit(workload.deploy.prometheus_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    values = {
        "prometheus": {"url": f"{address.scheme}://{address.hostname}", "port": port, "path": address.path.rstrip("/")},
        "rules": {
            "custom": [
                _rule(_FINISHED, _RATE_METRIC, f"rate(<<.Series>>{{<<.LabelMatchers>>}}[{_WINDOW}])"),
                _rule(_WAITING, _WAITING_METRIC, "<<.Series>>{<<.LabelMatchers>>}"),
            ]
        },
    }
    return yaml_text(values)


def _rule(series: str, name: str, expression: str) -> Document:
    return {
        "seriesQuery": f'{{__name__="{series}",namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"as": name},
        "metricsQuery": f"sum({expression}) by (<<.GroupBy>>)",
    }
