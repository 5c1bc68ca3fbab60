"""`tonle deploy render llmisvc`: KServe's LLMInferenceService, which brings llm-d's router, pool and route with it.

Does: the service; with `prefill_replicas`, prefill and decode in separate pods with a scaler for each. Does not: repeat what
KServe merges under every service (`kserve-config-llm-*`): ports, TLS, the sidecar, vLLM's image.

Replicas are left out where KEDA decides: `spec.scaling` would need llm-d's workload variant autoscaler, which is deprecated,
and KServe keeps the number that another autoscaler has set.
"""

from __future__ import annotations

import shlex

from tonle.deploy.autoscaling import Scaled, autoscalers, check_replicas, replicas
from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.endpoint_picker import configuration
from tonle.deploy.kserve import check_autoscaler, service_account
from tonle.deploy.kubernetes import disruption_budget
from tonle.deploy.monitoring import check_metrics, check_router, pod_monitors, scrape_annotations
from tonle.deploy.pod import (
    NAME_LABEL,
    ROLE_LABEL,
    container,
    environment,
    metadata,
    pod_settings,
    probes,
    resources,
    volumes,
)
from tonle.deploy.prefill import KV_TRANSFER, SIDE_CHANNEL, is_disaggregated, scaled_deployments
from tonle.deploy.workload import CACHE, MODELS, PORT, PRE_STOP_S, Workload

_DEFAULT_URI = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"  # the default model as KServe can bring it
_BEHIND_SIDECAR_PORT = 8001  # of vLLM in decode pods, as KServe's own configuration says
_PRE_STOP_S = 15  # of KServe's container: two hooks cannot be merged, so it keeps its own
_TLS = "/var/run/kserve/tls"  # where KServe mounts a certificate, if its configuration asks for TLS
_HAS_TLS = "{{ if .GlobalConfig.EnableTLS }}%s{{ else }}%s{{ end }}"  # KServe fills this in


def render(workload: Workload) -> list[RenderedFile]:
    check_replicas(workload)
    check_router(workload, "llmisvc")
    check_metrics(workload)
    check_autoscaler(workload)
    disaggregated = is_disaggregated(workload)
    scaled = scaled_deployments(workload, prefill="-kserve-prefill", decode="-kserve", both="-kserve")
    # KServe's labels
    selected = {
        NAME_LABEL: workload.name,
        "app.kubernetes.io/part-of": "llminferenceservice",
        "kserve.io/component": "workload",
    }
    roles = ("prefill", "decode") if disaggregated else ("both",)
    documents = [
        *service_account(workload),
        inference_service(workload, scaled, disaggregated=disaggregated),
        *(
            disruption_budget(workload, {**selected, ROLE_LABEL: role}, each.deployment)
            for role, each in zip(roles, scaled, strict=True)
        ),
        *autoscalers(workload, scaled),
        *pod_monitors(workload, selected),
    ]
    return [RenderedFile("llm-inference-service.yaml", documents, workload.resources.reason)]


def inference_service(workload: Workload, scaled: list[Scaled], *, disaggregated: bool) -> Document:
    spec: Document = {
        "model": {"uri": workload.storage_uri or _DEFAULT_URI, "name": workload.model_name},
        "router": {
            "gateway": {},
            "route": {},
            "scheduler": {"config": {"inline": configuration(disaggregated=disaggregated)}},
        },
        **_pods(
            workload, scaled[-1], disaggregated=disaggregated, port=_BEHIND_SIDECAR_PORT if disaggregated else PORT
        ),
    }
    if disaggregated:
        spec["prefill"] = _pods(workload, scaled[0], disaggregated=True, port=PORT)
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": metadata(workload),
        "spec": spec,
    }


def _pods(workload: Workload, scaled: Scaled, *, disaggregated: bool, port: int) -> Document:
    read, gpus = scrape_annotations(workload, port), workload.resources.gpus
    if read:
        read["prometheus.io/scheme"] = _HAS_TLS % ("https", "http")
    return {
        **replicas(workload, scaled),
        **({"annotations": read} if read else {}),
        **({"parallelism": {"tensor": gpus}} if gpus > 1 else {}),
        "template": _template(workload, disaggregated=disaggregated, port=port),
    }


def _template(workload: Workload, *, disaggregated: bool, port: int) -> Document:
    settings = pod_settings(workload, None)  # no labels are the same for prefill and decode
    settings["terminationGracePeriodSeconds"] += _PRE_STOP_S - PRE_STOP_S
    settings.pop("automountServiceAccountToken")  # the sidecar asks the cluster which pods it may talk to
    account = {"serviceAccountName": workload.name} if workload.deploy.hub_token_secret else {}
    if workload.is_ours:
        return {
            **settings,
            **account,
            "containers": [_our_server(workload)],
            "volumes": volumes(workload, fetches=False),
        }
    del settings["securityContext"]  # KServe's image has a user of its own
    return {**settings, **account, "containers": [_vllm(workload, disaggregated=disaggregated, port=port)]}


def _our_server(workload: Workload) -> Document:
    """All of a container, over KServe's for vLLM. TLS and the scheme of probes are as KServe is configured."""
    tls = (
        f"--ssl-certfile={_HAS_TLS % (f'{_TLS}/tls.crt', 'none')}",
        f"--ssl-keyfile={_HAS_TLS % (f'{_TLS}/tls.key', 'none')}",
    )
    names = None if workload.serve.served_model_name else workload.model_name
    server = container(workload, workload.args(MODELS, port=PORT, served_name=names, more=tls), name="main")
    del server["lifecycle"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        server[name]["httpGet"]["scheme"] = _HAS_TLS % ("HTTPS", "HTTP")
    return server


def _vllm(workload: Workload, *, disaggregated: bool, port: int) -> Document:
    """What differs from KServe's container: flags, which its script passes on through a shell, resources, patience."""
    flags = [flag for flag in workload.flags() if not flag.startswith("--tensor-parallel-size")]
    flags += [KV_TRANSFER] if disaggregated else []
    theirs = ("HOME", "HF_HOME")  # KServe's container has folders for them
    variables = [each for each in environment(workload) if each["name"] not in theirs and not _is_cached(each)]
    started = probes(workload, port)["startupProbe"]
    return {
        "name": "main",
        **({"image": workload.deploy.image} if workload.deploy.image else {}),
        "args": [shlex.quote(flag) for flag in flags],
        "env": [*variables, *(SIDE_CHANNEL if disaggregated else ())],
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],  # gives KServe's a name
        "resources": resources(workload),
        "startupProbe": {key: started[key] for key in ("periodSeconds", "timeoutSeconds", "failureThreshold")},
    }


def _is_cached(variable: Document) -> bool:
    """It names a folder of our volume, which is not there."""
    return str(variable.get("value", "")).startswith(CACHE)
