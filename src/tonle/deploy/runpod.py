"""`tonle deploy render runpod`: bodies of requests to RunPod's REST API (v2), and a script that sends them.

Does: a network volume for models and caches, a pod template and a pod, a serverless endpoint that answers jobs of its queue
(`runpod_worker.py`) and one that takes HTTP directly. Does not: hold keys: RunPod puts its secrets into variables.
"""

from __future__ import annotations

import shlex

from tonle import __version__
from tonle.deploy.document import Document, RenderedFile, json_file
from tonle.deploy.gpus import GPUS, Gpu
from tonle.deploy.model_size import is_path
from tonle.deploy.model_source import hub_model
from tonle.deploy.workload import CACHE, PORT, Workload
from tonle.errors import ConfigError

_WORKER_VOLUME = "/runpod-volume"  # where RunPod mounts it for serverless workers
_DISK_GB = 20  # of a container, besides the image
_MIN_CUDA = "13.0"  # of the host: what torch in Dockerfile.cuda is built for
_TIMEOUT_MS = 600_000  # of one request
_QUEUE_DELAY_S = 4
_IDLE_S = 60
MAX_CONCURRENCY = 32  # requests that a worker takes at once, where max_num_seqs does not say
_GB_PER_VCPU = {"cpu5c": 2, "cpu5g": 4}  # flavours; cores come in powers of two
_MAX_VCPUS = 32
_DEFAULT_SECRET = "tonle-api-key"
_ON_THE_VOLUME = ("TONLE_CACHE_DIR", "HF_HOME", "VLLM_CACHE_ROOT")
VOLUME_ID, TEMPLATE_ID = "VOLUME_ID", "TEMPLATE_ID"  # known once RunPod has created them; create.sh puts them in

# Serverless endpoints choose pools of cards, and may exclude some: pool, what else is in it that is not as good.
_POOLS = {
    "L4": ("AMPERE_24", ("NVIDIA RTX A5000", "NVIDIA GeForce RTX 3090")),
    "RTX-4090": ("ADA_24", ()),
    "A40": ("AMPERE_48", ()),
    "L40S": ("ADA_48_PRO", ()),
    "A100-80GB": ("AMPERE_80", ()),
    "H100": ("ADA_80_PRO", ()),
    "H200": ("HOPPER_141", ()),
    "B200": ("BLACKWELL_180", ()),
}


def render(workload: Workload) -> list[RenderedFile]:
    model = workload.serve.model
    if workload.deploy.storage_uri is None and model is not None and is_path(model):
        raise ConfigError(
            f"model: {model} is on this machine, where RunPod cannot read it; give a hub name", param="model"
        )
    files = [
        json_file("network-volume.json", network_volume(workload)),
        json_file("pod-template.json", pod_template(workload)),
        json_file("pod.json", pod(workload)),
        json_file("load-balancer-endpoint.json", load_balancer_endpoint(workload)),
    ]
    if workload.is_ours:  # vLLM's image has no worker for the queue
        files.append(json_file("queue-endpoint.json", queue_endpoint(workload)))
    return [*files, RenderedFile("create.sh", body=_script(workload))]


def network_volume(workload: Workload) -> Document:
    return {"name": workload.name, "size": _cache_gb(workload), "dataCenter": workload.deploy.data_center}


def pod_template(workload: Workload) -> Document:
    """What every pod has. Its port is open to the internet, so that callers always need a key."""
    secret = workload.deploy.api_key_secret or _DEFAULT_SECRET
    return {
        "name": workload.name,
        "category": "NVIDIA" if workload.resources.gpus else "CPU",
        **_container(workload, CACHE, {workload.api_key_variable: _secret(secret)}),
        "startSsh": False,
        "startJupyter": False,
    }


def pod(workload: Workload) -> Document:
    gpu, count = workload.resources.gpu, workload.resources.gpus
    return {
        "name": workload.name,
        "templateId": TEMPLATE_ID,
        **({"gpu": {"id": _gpu_id(gpu), "count": count, **_cuda(workload)}} if gpu else {"cpu": _cpu(workload)}),
        "dataCenterIds": [workload.deploy.data_center],
        "mounts": {"network": [{"volumeId": VOLUME_ID, "path": CACHE}]},
    }


def queue_endpoint(workload: Workload) -> Document:
    """RunPod's queue in front: jobs by /run, /runsync and /openai/v1."""
    on_queue = workload.deploy.scale_on == "queue"
    scaling: Document = (
        {"type": "REQUEST_COUNT", "requestCount": workload.deploy.waiting_requests}
        if on_queue
        else {"type": "QUEUE_DELAY", "queueDelay": _QUEUE_DELAY_S}
    )
    container = _container(workload, f"{_WORKER_VOLUME}/tonle", {"MAX_CONCURRENCY": str(_concurrency(workload))})
    arguments = [each for each in workload.args(_model(workload)) if not each.startswith(("--host=", "--port="))]
    container["args"] = shlex.join(["deploy", "runpod-worker", *arguments])
    del container["ports"]  # nothing is reached from outside
    return _endpoint(workload, "QUEUE", container, scaling, idle=not on_queue)


def load_balancer_endpoint(workload: Workload) -> Document:
    """Callers reach the server's own paths; RunPod sends no request to a worker that is not ready."""
    probe = {"PORT": str(PORT), "PORT_HEALTH": str(PORT), "HEALTH_CHECK_PATH": workload.ready_path}
    container = _container(workload, f"{_WORKER_VOLUME}/tonle", probe)
    scaling = {"type": "REQUEST_COUNT", "requestCount": _concurrency(workload)}
    return _endpoint(workload, "LOAD_BALANCER", container, scaling, idle=True)


def _endpoint(workload: Workload, type: str, container: Document, scaling: Document, *, idle: bool) -> Document:
    deploy, gpu = workload.deploy, workload.resources.gpu
    return {
        "name": f"{workload.name}-{'queue' if type == 'QUEUE' else 'http'}",
        "type": type,
        **container,
        **({"gpu": _pool(gpu, workload)} if gpu else {"cpu": [_cpu(workload)]}),
        "workers": {
            "min": deploy.min_replicas,
            "max": deploy.max_replicas,
            **({"idleTimeout": _IDLE_S} if idle else {}),
        },
        "scaling": scaling,
        "timeout": _TIMEOUT_MS,
        **({"flashboot": "FLASHBOOT"} if gpu else {}),
        "dataCenterIds": [deploy.data_center],
        "networkVolumes": [VOLUME_ID],
    }


def _container(workload: Workload, cache: str, variables: dict[str, str]) -> Document:
    """`cache`: where models and kernels are kept, on the volume. Home and state stay in the container: workers share the
    volume."""
    environment = {
        name: value.replace(CACHE, cache, 1) if name in _ON_THE_VOLUME else value
        for name, value in workload.environment().items()
    }
    environment["HOME"] = environment["HOME"] if workload.is_ours else "/tmp"
    if workload.deploy.hub_token_secret is not None:
        environment["HF_TOKEN"] = _secret(workload.deploy.hub_token_secret)
    command = workload.command()[1:] if workload.is_ours else []  # the rest of the image's entry point
    return {
        "image": image(workload),
        "args": shlex.join([*command, *workload.args(_model(workload))]),
        "disk": _DISK_GB,
        "ports": [f"{PORT}/http"],
        "env": environment | variables,
    }


def image(workload: Workload) -> str:
    """Made for RunPod: with its SDK, and as root, to whom its volumes belong (Dockerfile: EXTRAS, USER_ID)."""
    if workload.deploy.image is not None or not workload.is_ours:
        return workload.image
    return f"tonle:{__version__}{'-cuda' if workload.resources.gpus else ''}-runpod"


def _model(workload: Workload) -> str | None:
    return hub_model(workload, "RunPod", instead="put the model on the hub")


def _secret(name: str) -> str:
    """RunPod's names of secrets have underscores."""
    return f"{{{{ RUNPOD_SECRET_{name.replace('-', '_')} }}}}"


def _gpu_id(gpu: Gpu) -> str:
    """Raises `ConfigError`."""
    if gpu.runpod_id is not None:
        return gpu.runpod_id
    offered = ", ".join(name for name, each in GPUS.items() if each.runpod_id is not None)
    raise ConfigError(f"gpu: RunPod does not offer {gpu.name}; it offers: {offered}", param="gpu")


def _cuda(workload: Workload) -> Document:
    """The host's driver must be new enough for our torch; what vLLM's image needs is its own affair."""
    return {"minCudaVersion": _MIN_CUDA} if workload.is_ours else {}


def _pool(gpu: Gpu, workload: Workload) -> Document:
    _gpu_id(gpu)
    if gpu.name not in _POOLS:
        raise ConfigError(
            f"gpu: RunPod has no serverless workers with {gpu.name}; there are: {', '.join(_POOLS)}", param="gpu"
        )
    pool, excluded = _POOLS[gpu.name]
    others = {"excludedTypes": list(excluded)} if excluded else {}
    return {"pools": [pool], **others, "count": workload.resources.gpus, **_cuda(workload)}


def _cpu(workload: Workload) -> Document:
    """The smallest flavour with enough cores and memory. Raises `ConfigError`."""
    needed = workload.resources
    vcpus = 2
    while vcpus <= _MAX_VCPUS:
        for flavour, gb in _GB_PER_VCPU.items():
            if vcpus >= needed.cpu and vcpus * gb * 1e9 >= needed.memory_bytes:
                return {"id": flavour, "vcpuCount": vcpus}
        vcpus *= 2
    raise ConfigError(
        f"RunPod has no CPU machine with {needed.cpu} cores and {needed.memory_bytes / 1e9:.0f} GB; set gpu, or ask for less",
        param="memory",
    )


def _concurrency(workload: Workload) -> int:
    return workload.serve.max_num_seqs or MAX_CONCURRENCY


def _cache_gb(workload: Workload) -> int:
    """RunPod counts in GB and has volumes of 10 to 4096."""
    size = -(-workload.resources.fetch_bytes // 10**9)
    if size > 4096:
        raise ConfigError(f"model_cache: {size} GB are more than RunPod's 4096", param="model_cache")
    return max(10, size)


def _script(workload: Workload) -> str:
    kinds = ["pod", "load-balancer-endpoint", *(["queue-endpoint"] if workload.is_ours else [])]
    secrets = [
        f"{(workload.deploy.api_key_secret or _DEFAULT_SECRET).replace('-', '_')} (for pods: the key that callers send)"
    ]
    if workload.deploy.hub_token_secret is not None:
        secrets.append(f"{workload.deploy.hub_token_secret.replace('-', '_')} (the hub's token)")
    return _CREATE.replace("@kinds", "|".join(kinds)).replace("@secrets", ", ".join(secrets)).replace(
        "@image", shlex.quote(image(workload))
    )  # fmt: skip


_CREATE = """\
#!/usr/bin/env bash
# Creates what these files describe: RUNPOD_API_KEY=… IMAGE=docker.io/NAME/tonle:TAG bash create.sh @kinds
# The network volume is created first; VOLUME_ID=… uses one that is there already.
# Before: create these secrets in RunPod's console: @secrets.
# RUNPOD_API is the address of the API, for tests.
set -euo pipefail
cd "$(dirname "$0")"
kind=${1:-}
case "$kind" in
  @kinds) ;;
  *) echo "usage: $0 @kinds" >&2; exit 2 ;;
esac
: "${RUNPOD_API_KEY:?set it to an API key of RunPod}"
api=${RUNPOD_API:-https://api.runpod.io/v2}
image=${IMAGE:-@image}
if [[ $image != */* ]]; then
  echo "RunPod cannot pull $image: push it to a registry and set IMAGE, such as docker.io/NAME/$image" >&2
  exit 2
fi

# Sends a file with the names of what was created before, and prints the id in the answer.
create() {
  sed -e "s|VOLUME_ID|${VOLUME_ID:-}|" -e "s|TEMPLATE_ID|${TEMPLATE_ID:-}|" \\
      -e "s|\\"image\\": \\"[^\\"]*\\"|\\"image\\": \\"$image\\"|" "$2" |
    curl --silent --show-error --fail-with-body --request POST --header "Content-Type: application/json" \\
      --config <(printf 'header = "Authorization: Bearer %s"\\n' "$RUNPOD_API_KEY") --data-binary @- "$api/$1" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])'
}

if [[ -z ${VOLUME_ID:-} ]]; then
  VOLUME_ID=$(create network-volumes network-volume.json)
  echo "network volume $VOLUME_ID"
fi
if [[ $kind == pod ]]; then
  TEMPLATE_ID=$(create templates pod-template.json)
  echo "template $TEMPLATE_ID"
  echo "pod $(create pods pod.json)"
else
  echo "endpoint $(create serverless "$kind.json")"
fi
"""
