"""`tonle deploy render systemd`: a unit that runs a server on one machine, without containers.

Does: a user of its own for each start, a read-only system, one folder for the cache and one for state, keys as credentials.
Does not: install the package, or open ports to the network unless the settings' `host` does.
"""

from __future__ import annotations

from tonle.deploy.document import RenderedFile
from tonle.deploy.model_source import absolute_path, hub_model
from tonle.deploy.units import megabytes
from tonle.deploy.workload import CACHE, PRE_STOP_S, Workload
from tonle.errors import ConfigError

_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # folders that the unit does not see
_NOT_SAFE = set("\"'\\$%\n\t ;")

# What the server needs of the system, and no more. Not here: MemoryDenyWriteExecute, since kernels are compiled while it
# runs, and ProcSubset=pid, since /proc/meminfo and /proc/cpuinfo are read.
_HARDENING = """\
DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
"""
_NO_DEVICES = "PrivateDevices=yes\n"
_NVIDIA = """\
DevicePolicy=closed
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
"""


def render(workload: Workload) -> list[RenderedFile]:
    unit = workload.name if workload.name.startswith("tonle") else f"tonle-{workload.name}"
    return [RenderedFile(f"{unit}.service", comment=_usage(workload, unit), body=_unit(workload, unit))]


def _usage(workload: Workload, unit: str) -> str:
    program = workload.command()[0]
    keys = [
        f"{what} into {_credential(unit, name)}, readable by root alone"
        for name, what in (("keys", "`api_key: KEY`"), ("hub", "the hub's token"))
        if name in _credentials(workload)
    ]
    put = f"Before: write {'; '.join(keys)} (mode 600).\n" if keys else ""
    where, package = ("In a checkout of Tonle: ", ".") if workload.is_ours else ("", "vllm")
    return (
        f"{where}python3 -m venv /opt/{program} && /opt/{program}/bin/pip install {package}\n"
        f"{put}"
        f"install -m 644 {unit}.service /etc/systemd/system/ && systemctl daemon-reload && "
        f"systemctl enable --now {unit}\n"
        f"{workload.resources.reason}"
    )


def _unit(workload: Workload, unit: str) -> str:
    command, flags = workload.command(), _arguments(workload)
    lines = " \\\n    ".join([f"/opt/{command[0]}/bin/{' '.join(command)}", *map(_word, flags)])
    environment = "".join(f'Environment="{name}={value}"\n' for name, value in _environment(workload, unit).items())
    credentials = "".join(f"LoadCredential={name}:{_credential(unit, name)}\n" for name in _credentials(workload))
    cores = f"CPUQuota={100 * limit}%\n" if (limit := workload.resources.cpu_limit) else ""
    devices = _NVIDIA if workload.resources.gpus else _NO_DEVICES
    return f"""\
[Unit]
Description=Tonle: {workload.model_name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
ExecStart={lines}
{environment}{credentials}\
CacheDirectory={unit}
StateDirectory={unit}
WorkingDirectory=%S/{unit}
Restart=on-failure
RestartSec=5
# SIGTERM goes to the server alone, which lets running requests finish ({workload.drain_s} s) before it ends its engine.
KillMode=mixed
TimeoutStopSec={workload.grace_period_s - PRE_STOP_S}
LimitNOFILE=65536
{cores}MemoryMax={megabytes(workload.resources.memory_limit_bytes)}
OOMPolicy=stop

{_HARDENING}{devices}
[Install]
WantedBy=multi-user.target
"""


def _arguments(workload: Workload) -> list[str]:
    path = absolute_path(workload, "the unit runs elsewhere")
    if path is not None and path.startswith(_HIDDEN):
        raise ConfigError(
            f"model: {path} is in a folder that the unit's user cannot see; move it, for example to /srv/models",
            param="model",
        )
    instead = "model: /absolute/path of a folder or a .gguf file"
    model = path or hub_model(workload, "systemd", instead=instead)
    here = {"--host=": f"--host={workload.serve.host}", "--port=": f"--port={workload.serve.port}"}
    return [here.get(each[:7], each) for each in workload.args(model)]


def _word(text: str) -> str:
    """One word of a command line. systemd expands % and $, and has quotes of its own."""
    if not _NOT_SAFE & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + escaped.replace("$", "$$").replace("%", "%%") + '"'


def _credentials(workload: Workload) -> list[str]:
    deploy = workload.deploy
    return [*(["keys"] if deploy.api_key_secret else []), *(["hub"] if deploy.hub_token_secret else [])]


def _credential(unit: str, name: str) -> str:
    """Where root keeps it."""
    return f"/etc/{unit}/{name}" + (".yaml" if name == "keys" else "")


def _environment(workload: Workload, unit: str) -> dict[str, str]:
    """%C: /var/cache, %S: /var/lib, %d: where systemd shows credentials to the process, and only there."""
    variables = {name: value.replace(CACHE, f"%C/{unit}", 1) for name, value in workload.environment().items()}
    variables |= {"HOME": f"%S/{unit}", "XDG_STATE_HOME": f"%S/{unit}"}
    variables.pop("USER", None)  # systemd sets it
    if "keys" in _credentials(workload):
        if not workload.is_ours:
            raise ConfigError(
                "api_key_secret: vLLM reads no key from a file; leave it out, listen on 127.0.0.1 and put `tonle gateway` "
                "in front of it",
                param="api_key_secret",
            )
        variables["TONLE_CONFIG"] = "%d/keys"
    if "hub" in _credentials(workload):
        variables["HF_TOKEN_PATH"] = "%d/hub"
    return variables
