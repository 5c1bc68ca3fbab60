"""`tonle deploy render keda`: what adds replicas to the Deployments of `kubernetes` or `llm-d`, by KEDA.

Does: one ScaledObject, or one each for prefill and decode. Does not: install KEDA or Prometheus.
"""

from __future__ import annotations

from tonle.deploy.autoscaling import check_replicas, scaled_object
from tonle.deploy.document import RenderedFile
from tonle.deploy.monitoring import check_metrics
from tonle.deploy.prefill import scaled_deployments
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError


def render(workload: Workload) -> list[RenderedFile]:
    if workload.deploy.autoscaler != "keda":
        raise ConfigError(
            f"autoscaler is {workload.deploy.autoscaler}, and two autoscalers of one Deployment work against each other; set "
            "autoscaler: keda",
            param="autoscaler",
        )
    check_replicas(workload)
    check_metrics(workload)
    scaled = scaled_deployments(workload)
    what = "requests per second and " if workload.deploy.scale_on == "requests" else ""
    comment = f"Replicas by {what}requests that wait, of {' and '.join(each.deployment for each in scaled)}."
    return [RenderedFile("keda.yaml", [scaled_object(workload, each) for each in scaled], comment)]
