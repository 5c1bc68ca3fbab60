"""`Workload`: one service as every platform needs it: its name, image, command, resources, probes.

Does: settle what the settings leave open, and refuse what cannot work. Does not: write any platform's documents.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tonle import __version__
from tonle.config.deploy import DeployConfig
from tonle.config.serve import ServeConfig
from tonle.deploy.command_line import tonle_flags, vllm_flags
from tonle.deploy.model_size import ModelSize, model_size
from tonle.deploy.resources import Resources, resources_for
from tonle.errors import ConfigError
from tonle.models import default_model

VLLM_VERSION = "v0.27.1"
PORT = 8000
PRE_STOP_S = 5  # between a pod's removal from its endpoints and SIGTERM: proxies notice meanwhile
_MARGIN_S = 10  # after the drain, before SIGKILL
_LOAD_BYTES_PER_S = 100_000_000  # of a slow disk or network: how long a start may take
_CACHE = "/cache"
MODELS = "/mnt/models"  # where KServe puts a model that it brings


@dataclass(frozen=True, slots=True)
class Workload:
    serve: ServeConfig
    deploy: DeployConfig
    size: ModelSize
    resources: Resources

    @classmethod
    def of(cls, serve: ServeConfig, deploy: DeployConfig) -> Self:
        """Raises `ConfigError`."""
        if deploy.engine == "tonle" and deploy.gpus > 1:
            raise ConfigError(
                f"gpus: {deploy.gpus} would need tensor parallelism, which our engine does not have in this version; set "
                "engine: vllm, or gpus: 1 and more replicas",
                param="gpus",
            )
        if deploy.engine == "vllm" and serve.model is None:
            raise ConfigError(
                "engine: vllm needs a model that vLLM can load; name one, for example model: org/name", param="model"
            )
        size = model_size(serve.model, dtype=serve.dtype, parameters=deploy.parameters)
        made = cls(serve, deploy, size, resources_for(size, serve, deploy))
        made.flags()  # refuses now what cannot go into a container
        return made

    # -- what it is

    @property
    def name(self) -> str:
        if self.deploy.name is not None:
            return self.deploy.name
        bare = re.sub(r"[^a-z0-9]+", "-", self.model_name.rsplit("/", 1)[-1].lower()).strip("-")
        return (bare if bare[:1].isalpha() else f"model-{bare}")[:53].rstrip("-")

    @property
    def model_name(self) -> str:
        """What callers of the API name."""
        if self.serve.served_model_name:
            return self.serve.served_model_name[0]
        model = self.serve.model
        return default_model.NAME if model is None else Path(model).name if self._is_path else model

    @property
    def model(self) -> str | None:
        """What a container that finds its own model is told to serve: a hub name, or None for the default model."""
        if self._is_path:
            raise ConfigError(
                f"model: {self.serve.model} is on this machine, where no pod can read it; set deploy.storage_uri, for "
                "example pvc://models/mine, or give a hub name",
                param="storage_uri",
            )
        return self.serve.model

    @property
    def storage_uri(self) -> str | None:
        """Where a platform that brings models finds it. None: the default model, which the container fetches itself."""
        if self.deploy.storage_uri is not None:
            return self.deploy.storage_uri
        return None if self.model is None else f"hf://{self.model}"

    @property
    def _is_path(self) -> bool:
        model = self.serve.model
        return model is not None and (Path(model).expanduser().exists() or model.startswith(("/", ".", "~")))

    @property
    def image(self) -> str:
        if self.deploy.image is not None:
            return self.deploy.image
        if self.deploy.engine == "vllm":
            return f"vllm/vllm-openai{'' if self.resources.gpus else '-cpu'}:{VLLM_VERSION}"
        return f"tonle:{__version__}{'-cuda' if self.resources.gpus else ''}"

    # -- how it runs

    @property
    def is_ours(self) -> bool:
        return self.deploy.engine == "tonle"

    def flags(self) -> list[str]:
        """Of the server, without where it listens and what it serves."""
        return tonle_flags(self.serve) if self.is_ours else vllm_flags(self.serve, gpus=self.resources.gpus)

    def command(self) -> list[str]:
        return ["tonle", "serve"] if self.is_ours else ["vllm", "serve"]

    def args(self, model: str | None, *, port: int = PORT, served_name: str | None = None) -> list[str]:
        """The command's arguments, for a server of `model`."""
        names = [served_name] if served_name is not None else list(self.serve.served_model_name)
        flags = [f"--served-model-name={name}" for name in names]
        return [*([model] if model else []), "--host=0.0.0.0", f"--port={port}", *flags, *self.flags()]

    @property
    def drain_s(self) -> int:
        return math.ceil(self.serve.drain_s)

    @property
    def grace_period_s(self) -> int:
        """From the request to stop to SIGKILL."""
        return PRE_STOP_S + self.drain_s + _MARGIN_S

    @property
    def start_s(self) -> int:
        """The longest a start may take: fetching and loading the weights, and a minute."""
        return 60 * math.ceil(1 + self.size.weight_bytes / _LOAD_BYTES_PER_S / 60)

    @property
    def ready_path(self) -> str:
        return "/health/ready" if self.is_ours else "/health"

    @property
    def live_path(self) -> str:
        return "/health/live" if self.is_ours else "/health"

    @property
    def cache_dir(self) -> str:
        return _CACHE

    def environment(self) -> dict[str, str]:
        """Plain variables; the file system of a container is read-only but for the cache and /tmp."""
        if self.is_ours:
            return {"TONLE_CACHE_DIR": _CACHE, "XDG_STATE_HOME": f"{_CACHE}/state", "HOME": _CACHE}
        return {"HF_HOME": f"{_CACHE}/huggingface", "VLLM_CACHE_ROOT": f"{_CACHE}/vllm", "HOME": _CACHE, "USER": "vllm"}
