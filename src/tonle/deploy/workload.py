"""`Workload`: one service as every platform needs it: its name, image, command, resources, probes.

Does: settle what the settings leave open, and refuse what cannot work. Does not: write any platform's documents.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Self

from tonle import __version__
from tonle.config.deploy import MAX_NAME, DeployConfig
from tonle.config.serve import ServeConfig
from tonle.deploy.command_line import tonle_flags, vllm_flags
from tonle.deploy.model_size import ModelSize, is_path, model_size
from tonle.deploy.resources import Resources, resources_for
from tonle.deploy.units import GIB
from tonle.errors import ConfigError
from tonle.models import default_model

VLLM_VERSION = "v0.27.1"
PORT = 8000
PRE_STOP_S = 5  # between a pod's removal from its endpoints and SIGTERM: proxies notice meanwhile
_MARGIN_S = 10  # after the drain, before SIGKILL
_LOAD_BYTES_PER_S = 100_000_000  # of a slow disk or network: how long a start may take
_START_S = {"tonle": 180, "vllm": 600}  # besides: kernels and graphs are compiled in a cache that is empty
CACHE = "/cache"  # in a container: what is fetched and compiled
MODELS = "/mnt/models"  # in a container: a model that the platform brings


@dataclass(frozen=True, slots=True)
class Workload:
    serve: ServeConfig
    deploy: DeployConfig
    size: ModelSize
    resources: Resources

    @classmethod
    def of(cls, serve: ServeConfig, deploy: DeployConfig) -> Self:
        """Raises `ConfigError`."""
        serve, deploy = _same_gpus(serve, deploy)
        if deploy.engine == "vllm" and serve.model is None and deploy.storage_uri is None:
            raise ConfigError(
                "engine: vllm needs a model that vLLM can load; name one, for example model: Qwen/Qwen2.5-7B-Instruct",
                param="model",
            )
        if deploy.engine == "tonle" and deploy.api_key_secret is not None and serve.frontends > 1:
            raise ConfigError(
                "api_key_secret does not go with frontends: keys are the work of one process; set frontends: 1, or run "
                "`tonle gateway` with the key in front of the replicas",
                param="frontends",
            )
        model = _named(serve, deploy)
        size = model_size(model, dtype=serve.dtype, parameters=deploy.parameters, on_gpu=deploy.gpu is not None)
        made = cls(serve, deploy, size, resources_for(size, serve, deploy))
        made.flags()  # refuses now what cannot go into a container
        return made

    # -- what it is

    @property
    def name(self) -> str:
        if self.deploy.name is not None:
            return self.deploy.name
        bare = re.sub(r"[^a-z0-9]+", "-", self.model_name.rsplit("/", 1)[-1].lower()).strip("-")
        return (bare if bare[:1].isalpha() else f"model-{bare}")[:MAX_NAME].rstrip("-")

    @property
    def model_name(self) -> str:
        """What callers of the API name."""
        if self.serve.served_model_name:
            return self.serve.served_model_name[0]
        model = _named(self.serve, self.deploy)
        if model is None:
            return default_model.NAME
        return model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") if is_path(model) else model

    @property
    def model(self) -> str | None:
        """What a container that finds its own model is told to serve: a hub name, or None for the default model."""
        model = self.serve.model
        if model is not None and is_path(model):
            raise ConfigError(
                f"model: {model} is on this machine, where no pod can read it; set deploy.storage_uri, for example "
                "pvc://models/mine, or give a hub name",
                param="storage_uri",
            )
        return None if model == default_model.NAME else model

    @property
    def storage_uri(self) -> str | None:
        """Where a platform that brings models finds it. None: the default model, which the container fetches itself."""
        if self.deploy.storage_uri is not None:
            return self.deploy.storage_uri
        return None if self.model is None else f"hf://{self.model}"

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

    def args(
        self, model: str | None, *, port: int = PORT, served_name: str | None = None, more: tuple[str, ...] = ()
    ) -> list[str]:
        """The command's arguments, for a server of `model`; `served_name` comes before the file's own names."""
        names = list(dict.fromkeys([*([] if served_name is None else [served_name]), *self.serve.served_model_name]))
        flags = [] if not names else [f"--served-model-name={','.join(names)}"]
        if not self.is_ours and len(names) > 1:  # vLLM takes a list, and of a repeated flag the last one
            flags = ["--served-model-name", *names]
        return [*([model] if model else []), "--host=0.0.0.0", f"--port={port}", *flags, *self.flags(), *more]

    @property
    def drain_s(self) -> int:
        return math.ceil(self.serve.drain_s)

    @property
    def grace_period_s(self) -> int:
        """From the request to stop to SIGKILL."""
        return PRE_STOP_S + self.drain_s + _MARGIN_S

    @property
    def start_s(self) -> int:
        """The longest a start may take: fetching and loading the weights, and what the engine needs besides."""
        loading_s = (self.size.file_bytes + self.size.weight_bytes) / _LOAD_BYTES_PER_S
        return 60 * math.ceil((_START_S[self.deploy.engine] + loading_s) / 60)

    @property
    def ready_path(self) -> str:
        return "/health/ready" if self.is_ours else "/health"

    @property
    def live_path(self) -> str:
        return "/health/live" if self.is_ours else "/health"

    @property
    def api_key_variable(self) -> str:
        """The environment variable that the server reads its key from."""
        return "TONLE_API_KEY" if self.is_ours else "VLLM_API_KEY"

    def environment(self) -> dict[str, str]:
        """Plain variables; the file system of a container is read-only but for the cache and /tmp."""
        if self.is_ours:
            return {"TONLE_CACHE_DIR": CACHE, "XDG_STATE_HOME": f"{CACHE}/state", "HOME": CACHE}
        variables = {
            "HF_HOME": f"{CACHE}/huggingface", "VLLM_CACHE_ROOT": f"{CACHE}/vllm", "HOME": CACHE,
            "USER": "vllm",  # torch asks who it is, and the image does not know our user
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": self.serve.log_level,
        }  # fmt: skip
        if not self.resources.gpus:
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(self.resources.kv_bytes / GIB))
        return variables


def _same_gpus(serve: ServeConfig, deploy: DeployConfig) -> tuple[ServeConfig, DeployConfig]:
    """The settings with as many GPUs in a pod as the server is told to use: each of the two follows from the other."""
    size = serve.tensor_parallel_size
    if size > 1 and deploy.gpu is None:
        raise ConfigError(
            f"tensor_parallel_size: {size} divides a model between GPUs; set gpu, for example gpu: H100, or leave it out",
            param="tensor_parallel_size",
        )
    if size > 1 and deploy.gpus not in (1, size):
        raise ConfigError(
            f"tensor_parallel_size: {size} and gpus: {deploy.gpus} contradict each other: a pod has as many GPUs as its server "
            "uses; set one of them",
            param="gpus",
        )
    gpus = max(size, deploy.gpus)
    return replace(serve, tensor_parallel_size=gpus if deploy.engine == "tonle" else 1), replace(deploy, gpus=gpus)


def _named(serve: ServeConfig, deploy: DeployConfig) -> str | None:
    """What the settings say of the model: its path or hub name, else the end of its URI. None: the default model."""
    uri = deploy.storage_uri
    if serve.model is not None or uri is None:
        return serve.model
    scheme, _, rest = uri.partition("://")
    rest = rest.partition(":")[0] if scheme == "hf" else rest  # without a revision
    return rest if scheme == "hf" else f"./{rest.rstrip('/').rsplit('/', 1)[-1]}"
