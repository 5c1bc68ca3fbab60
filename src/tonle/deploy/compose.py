"""`tonle deploy render compose`: a server, a gateway with keys and an audit trail before it, Prometheus and Grafana.

Does: one machine. Does not: scale, build the images (deploy/docker) or write keys: `make-keys.sh`, run there, draws them.
"""

from __future__ import annotations

from tonle import __version__
from tonle.config.gateway import SETTINGS as GATEWAY_SETTINGS
from tonle.deploy.dashboard import dashboard
from tonle.deploy.document import Document, RenderedFile, json_file
from tonle.deploy.model_source import absolute_path, hub_model
from tonle.deploy.pod import USER_ID
from tonle.deploy.units import megabytes
from tonle.deploy.workload import CACHE, MODELS, PORT, PRE_STOP_S, Workload

GATEWAY_PORT = 8080
_PROMETHEUS = "prom/prometheus:v3.5.0"
_GRAFANA = "grafana/grafana:12.1.1"
_HEALTH = (  # python3: every image has it, which is more than can be said of curl
    "import http.client; c = http.client.HTTPConnection('127.0.0.1', {port}, timeout=5); c.request('GET', '{path}'); "
    "raise SystemExit(c.getresponse().status != 200)"
)
_USAGE = """\
sh make-keys.sh && docker compose up -d --wait
The API: http://127.0.0.1:8080/v1 with the key that make-keys.sh prints. Grafana: http://127.0.0.1:3000, user admin,
password in keys/grafana.env. Both listen on this machine only; GATEWAY_ADDRESS=0.0.0.0 opens the API to others.
"""


def render(workload: Workload) -> list[RenderedFile]:
    return [
        RenderedFile("compose.yaml", [compose(workload)], _USAGE + workload.resources.reason),
        RenderedFile("make-keys.sh", body=_make_keys(workload)),
        RenderedFile("prometheus.yml", [prometheus()]),
        RenderedFile("grafana/datasources/prometheus.yaml", [_datasource()]),
        RenderedFile("grafana/dashboards/folder.yaml", [_dashboard_folder()]),
        json_file("grafana/dashboards/tonle.json", dashboard()),
    ]


def compose(workload: Workload) -> Document:
    return {
        "name": workload.name,
        "services": {
            "server": _server(workload),
            "gateway": _gateway(workload),
            "prometheus": _prometheus(),
            "grafana": _grafana(),
        },
        "volumes": {"models": {}, "gateway": {}, "audit": {}, "prometheus": {}, "grafana": {}},
        "secrets": {"metrics-key": {"file": "./keys/metrics.key"}},
    }


def _server(workload: Workload) -> Document:
    volumes: list[Document | str] = [f"models:{CACHE}"]
    if path := absolute_path(workload, "it is mounted into the container"):
        volumes.append({"type": "bind", "source": _literal(path), "target": MODELS, "read_only": True})
        args = workload.args(MODELS, served_name=workload.model_name)
    else:
        instead = "model: /absolute/path, which is mounted into the container"
        args = workload.args(hub_model(workload, "Docker Compose", instead=instead))
    return {
        "image": _literal(workload.image),
        "entrypoint": workload.command(),
        "command": [_literal(word) for word in args],
        "environment": {name: _literal(value) for name, value in workload.environment().items()},
        **({"env_file": [{"path": "./keys/hub.env", "required": True}]} if workload.deploy.hub_token_secret else {}),
        "volumes": volumes,
        **_safe(stop_s=_stop_s(workload), own_user=workload.is_ours),
        "shm_size": "1gb",
        "healthcheck": _health(PORT, workload.ready_path, start_s=workload.start_s),
        "deploy": {"resources": _resources(workload)},
    }


def _gateway(workload: Workload) -> Document:
    drain = GATEWAY_SETTINGS["drain"].type.show(workload.serve.drain_s)
    return {
        "image": f"${{GATEWAY_IMAGE:-tonle:{__version__}-gateway}}",
        "entrypoint": ["tonle", "gateway"],
        "command": [
            "--host=0.0.0.0", f"--port={GATEWAY_PORT}", f"--backend=http://server:{PORT}", "--audit-dir=/cache/audit",
            f"--drain={drain}",
        ],
        "env_file": [{"path": "./keys/gateway.env", "required": True}],
        "ports": [f"${{GATEWAY_ADDRESS:-127.0.0.1}}:{GATEWAY_PORT}:{GATEWAY_PORT}"],
        "volumes": ["gateway:/cache", "audit:/cache/audit"],
        "depends_on": {"server": {"condition": "service_healthy"}},
        **_safe(stop_s=_stop_s(workload)),
        "healthcheck": _health(GATEWAY_PORT, "/health/ready", start_s=20),
        "deploy": {"resources": {"limits": {"memory": "1024M"}}},
    }  # fmt: skip


def _prometheus() -> Document:
    return {
        "image": _PROMETHEUS,
        "command": [
            "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus",
            "--storage.tsdb.retention.time=15d",
        ],
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
        "secrets": ["metrics-key"],
        **_safe(stop_s=30, own_user=False),
    }  # fmt: skip


def _grafana() -> Document:
    return {
        "image": _GRAFANA,
        "environment": {"GF_ANALYTICS_REPORTING_ENABLED": "false", "GF_PLUGINS_PREINSTALL_DISABLED": "true"},
        "env_file": [{"path": "./keys/grafana.env", "required": True}],
        "ports": ["127.0.0.1:3000:3000"],
        "volumes": [
            "./grafana/datasources:/etc/grafana/provisioning/datasources:ro",
            "./grafana/dashboards:/etc/grafana/provisioning/dashboards:ro",
            "grafana:/var/lib/grafana",
        ],
        "depends_on": ["prometheus"],
        **_safe(stop_s=30, own_user=False),
    }


def _literal(text: str) -> str:
    """Compose replaces $NAME; what comes from the settings is meant as it stands."""
    return text.replace("$", "$$")


def _safe(*, stop_s: int, own_user: bool = True) -> Document:
    """What every container has. `own_user`: it is an image of ours, whose volumes belong to that user."""
    return {
        **({"user": f"{USER_ID}:{USER_ID}"} if own_user else {}),
        "init": True,
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"nofile": {"soft": 65536, "hard": 65536}},
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_s}s",
    }


def _stop_s(workload: Workload) -> int:
    """There is no proxy to wait for here: SIGTERM comes first."""
    return workload.grace_period_s - PRE_STOP_S


def _health(port: int, path: str, *, start_s: int) -> Document:
    return {
        "test": ["CMD", "python3", "-c", _HEALTH.format(port=port, path=path)],
        "interval": "10s", "timeout": "6s", "retries": 3, "start_period": f"{start_s}s", "start_interval": "1s",
    }  # fmt: skip


def _resources(workload: Workload) -> Document:
    needed = workload.resources
    cores = {"cpus": str(needed.cpu_limit)} if needed.cpu_limit else {}
    found: Document = {"limits": {**cores, "memory": megabytes(needed.memory_limit_bytes)}}
    if needed.gpus:
        found["reservations"] = {"devices": [{"driver": "nvidia", "count": needed.gpus, "capabilities": ["gpu"]}]}
    return found


def prometheus() -> Document:
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "scrape_configs": [
            {"job_name": "server", "static_configs": [{"targets": [f"server:{PORT}"]}]},
            {
                "job_name": "gateway",
                "authorization": {"type": "Bearer", "credentials_file": "/run/secrets/metrics-key"},
                "static_configs": [{"targets": [f"gateway:{GATEWAY_PORT}"]}],
            },
        ],
    }


def _datasource() -> Document:
    source = {
        "name": "Prometheus", "uid": "prometheus", "type": "prometheus", "access": "proxy", "isDefault": True,
        "url": "http://prometheus:9090", "jsonData": {"timeInterval": "5s"},
    }  # fmt: skip
    return {"apiVersion": 1, "datasources": [source]}


def _dashboard_folder() -> Document:
    provider = {
        "name": "tonle", "type": "file", "disableDeletion": True, "allowUiUpdates": False,
        "options": {"path": "/etc/grafana/provisioning/dashboards"},
    }  # fmt: skip
    return {"apiVersion": 1, "providers": [provider]}


def _make_keys(workload: Workload) -> str:
    token = (
        """\
: "${HF_TOKEN:?set it to the token that may fetch the model}"
printf 'HF_TOKEN=%s\\n' "$HF_TOKEN" > keys/hub.env
"""
        if workload.deploy.hub_token_secret
        else ""
    )
    before, _, after = _MAKE_KEYS.partition("@token\n")
    return before + token + after


_MAKE_KEYS = """\
#!/bin/sh
# Draws the keys that compose.yaml reads, once: callers' key, Prometheus' key for the gateway's metrics, Grafana's password.
set -eu
umask 077
cd "$(dirname "$0")"
if [ -e keys ]; then
  echo "keys/ is already there; remove it to draw new ones" >&2
  exit 1
fi
mkdir keys
draw() { head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; }
caller=$(draw)
metrics=$(draw)
@token
printf 'TONLE_API_KEY=%s,%s\\n' "$caller" "$metrics" > keys/gateway.env
printf '%s' "$metrics" > keys/metrics.key
chmod 644 keys/metrics.key # another user reads it in Prometheus' container; the folder is closed to the others here
printf 'GF_SECURITY_ADMIN_PASSWORD=%s\\n' "$(draw)" > keys/grafana.env
printf '*\\n' > keys/.gitignore
echo "The key of callers: $caller"
"""
