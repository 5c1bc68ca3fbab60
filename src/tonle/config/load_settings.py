"""Settings from a file, the environment and the command line, in that order of strength: file < environment < flags.

Does: read, refuse what it does not know, say where a wrong value came from. Does not: hold defaults (`serve.py`,
`gateway.py`) or know how values are written (`values.py`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tonle.config.audit import MIDDLEWARE_SETTINGS
from tonle.config.cache_dir import choose_cache_dir
from tonle.config.deploy import DEPLOY_SETTINGS, DeployConfig
from tonle.config.gateway import SETTINGS as GATEWAY_SETTINGS
from tonle.config.gateway import GatewayConfig
from tonle.config.ray import RAY_SETTINGS, RayConfig
from tonle.config.serve import SETTINGS, ServeConfig
from tonle.config.setting import ENV_PREFIX, Setting
from tonle.config.workers import WORKER_SETTINGS, WorkerServerConfig
from tonle.config.yaml_fault import yaml_fault
from tonle.errors import ConfigError

# Variables of ours that are not settings.
_CONFIG_VARIABLE = "TONLE_CONFIG"
_OTHER_VARIABLES = (_CONFIG_VARIABLE, "TONLE_DEBUG")
_OF_TESTS = ("TONLE_K8S_SCHEMAS", "TONLE_SEED_DOCS")  # set for a whole run of them, in which servers are started
# Of a file: read by `tonle deploy` and `tonle ray`, passed over by servers.
_DEPLOY_SECTION, _RAY_SECTION = "deploy", "ray"

# Units that users may add to a setting's name; names have none (`setting.py`).
_UNIT = re.compile("_(s|sec|seconds|ms|b|bytes|kb|mb|mib|gb|gib)$", re.IGNORECASE)

# Kubernetes describes a service called "tonle" or "tonle-..." to every pod in variables that begin like ours, one of
# them being TONLE_PORT=tcp://10.0.0.1:8000. They are not meant for us.
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(rf"{ENV_PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*")


def load(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> ServeConfig:
    """By public name: `flags` as parsed, over variables, over `file` (or the one TONLE_CONFIG names).

    `cache_dir` takes effect here, for every verb and the processes it starts. `environ` is for tests: settings are read
    from it instead, and this process keeps its cache directory.
    """
    config = ServeConfig(**_gather(SETTINGS, flags, file, environ))
    config.validate()
    if config.cache_dir is not None and environ is None:
        choose_cache_dir(config.cache_dir)
    return config


def load_gateway(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> GatewayConfig:
    """The same, for a gateway."""
    config = GatewayConfig(**_gather(GATEWAY_SETTINGS, flags, file, environ))
    config.validate()
    return config


def load_worker(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> WorkerServerConfig:
    """The same, for a server of one worker pool."""
    config = WorkerServerConfig(**_gather(WORKER_SETTINGS, flags, file, environ))
    config.validate()
    return config


def load_deploy(flags: Mapping[str, Any], *, file: Path | None = None) -> tuple[ServeConfig, DeployConfig]:
    """The server's settings and the `deploy` section of one file. `flags`: of the section. This machine's variables are
    not read: the documents must be the same wherever they are rendered."""
    serve = ServeConfig(**_gather(SETTINGS, {}, file, {}))
    serve.validate()
    deploy = DeployConfig(**_section(_DEPLOY_SECTION, DEPLOY_SETTINGS, flags, file))
    deploy.validate()
    return serve, deploy


def load_ray(flags: Mapping[str, Any], *, file: Path | None = None) -> tuple[ServeConfig, RayConfig, dict[str, Any]]:
    """The server's settings and the `ray` section of one file, and the former as the file has them, for other machines. `flags`:
    of the section. This machine's variables are not read: replicas run elsewhere."""
    serve = ServeConfig(**_gather(SETTINGS, {}, file, {}))
    serve.validate()
    config = RayConfig(**_section(_RAY_SECTION, RAY_SETTINGS, flags, file))
    config.validate()
    content = {} if file is None else _contents(file)
    return serve, config, {name: value for name, value in content.items() if name in SETTINGS}


def _section(name: str, settings: Mapping[str, Setting], flags: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Values by field, of one section of a file and of flags, which are stronger."""
    section = {} if file is None else _contents(file).get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: {name} must hold settings such as `name: my-service`, not {section!r}")
    _refuse_unknown(f"{file}: {name}", section, settings)
    known = {key: _read(settings[key], value, f"{file}: {name}: {key}") for key, value in section.items()}
    known |= {key: _read(settings[key], value, settings[key].flag) for key, value in flags.items()}
    return {settings[key].field: value for key, value in known.items()}


def _gather(
    settings: Mapping[str, Setting], flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str] | None
) -> dict[str, Any]:
    """Values by field."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(_CONFIG_VARIABLE):
        file = Path(environ[_CONFIG_VARIABLE])
    values: dict[str, Any] = {} if file is None else _from_file(file, settings)
    values |= _from_environment(environ, settings)
    values |= {name: _read(settings[name], value, settings[name].flag) for name, value in flags.items()}
    return {settings[name].field: value for name, value in values.items()}


def _from_file(file: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    content = _contents(file)
    for section in (_DEPLOY_SECTION, _RAY_SECTION):
        content.pop(section, None)
    _refuse_unknown(str(file), content, settings)
    return {name: _read(settings[name], value, f"{file}: {name}") for name, value in content.items()}


def _contents(file: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings in {file}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {yaml_fault(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} must hold one setting per line, such as `port: 8000`, not a {type(content).__name__}"
        )
    return content


def _refuse_unknown(origin: str, content: Mapping[Any, Any], settings: Mapping[str, Setting]) -> None:
    for key in content:
        if key not in settings:
            raise ConfigError(f"{origin}: unknown setting {key!r}; {_nearest(str(key), settings)}", param=str(key))


def _from_environment(environ: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """An empty variable counts as unset: that is how compose files and shells unset one.

    Server, gateway and the audit middleware may share an environment: variables of the others are ignored.
    """
    ours = {setting.env: setting for setting in settings.values()}
    tables = (SETTINGS, GATEWAY_SETTINGS, MIDDLEWARE_SETTINGS, WORKER_SETTINGS)
    theirs = {setting.env for table in tables for setting in table.values()}
    values = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in (*_OTHER_VARIABLES, *_OF_TESTS) or not value:
            continue
        if _SERVICE_LINK.fullmatch(variable) or _SERVICE_ADDRESS.fullmatch(f"{variable}={value}"):
            continue
        if variable in ours:
            values[ours[variable].name] = _read(ours[variable], value, f"the environment variable {variable}")
        elif variable not in theirs:
            nearest = _nearest(variable, [*ours, *_OTHER_VARIABLES])
            raise ConfigError(f"unknown environment variable {variable}; {nearest}", param=variable)
    return values


def _read(setting: Setting, value: object, origin: str) -> Any:
    try:
        return setting.type.read(value)
    except ValueError as error:
        raise ConfigError(f"{origin} {error}", param=setting.name) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    """What the user may have meant by `name`. The prefix that all variables share is not compared."""
    bare = {entry.removeprefix(ENV_PREFIX): entry for entry in known}
    wanted = name.removeprefix(ENV_PREFIX).replace("-", "_")
    if (unitless := _UNIT.sub("", wanted)) != wanted and unitless in bare:
        return f"did you mean {bare[unitless]}? The unit goes with the value, such as 30s or 2GiB"
    near = difflib.get_close_matches(wanted, bare, n=1)
    return f"did you mean {bare[near[0]]}?" if near else f"there are: {', '.join(bare.values())}"
