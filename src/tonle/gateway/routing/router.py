"""Choose: alias → experiment → who has the model and is well → length class → prefix → least load.

Does: name a backend and say why. Does not: send, wait or count failures.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from tonle.config.gateway import GatewayConfig
from tonle.config.rows import ArmRow, ExperimentRow
from tonle.errors import InvalidRequest, UnknownModel
from tonle.gateway.api_keys.key import Key
from tonle.gateway.backends.backend import Backend, ModelEntry
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.call import Call
from tonle.gateway.refusals import NoBackend
from tonle.gateway.routing.experiments import assign
from tonle.gateway.routing.prefix_affinity import MAX_PIECES, PIECE_CHARS, PrefixMemory, first_home, piece_names

# Affinity gives way when its backend has this much more than the average.
LOAD_FACTOR = 1.25
LOAD_SLACK = 4.0  # requests
UNKNOWN_CONTEXT = 131_072  # tokens: what a backend that does not say is taken to write at the most


@dataclass(frozen=True, slots=True)
class Route:
    backend: Backend
    why: str  # only, experiment, length, prefix, load
    prefill: Backend | None = None  # computes the prompt first, where roles are apart


class Router:
    def __init__(self, pool: BackendPool, config: GatewayConfig) -> None:
        self._pool = pool
        self._config = config
        self._aliases = dict(config.aliases)
        self._experiments: dict[str, ExperimentRow] = {row.model: row for row in config.experiments}
        self._prefixes = PrefixMemory()

    # -- names

    def public_models(self) -> dict[str, ModelEntry]:
        """What callers may ask for: the backends' models, aliases, and models of experiments."""
        models = self._pool.models()
        for public, model in self._aliases.items():
            if model in models:
                models[public] = models[model]
        for experiment in self._config.experiments:
            first = experiment.arms[0].model
            if experiment.model not in models and first in models:
                models[experiment.model] = models[first]
        return models

    def resolve(self, call: Call) -> None:
        """The model behind the name, and the arm of an experiment. Raises `UnknownModel`, `InvalidRequest`."""
        asked = call.asked_model = call.asked_model or self._only_name(call.key)
        model = self._aliases.get(asked, asked)
        experiment = self._experiments.get(asked) or self._experiments.get(model)
        arm = assign(experiment, call.subject) if experiment is not None else None
        if experiment is not None:
            arm_model = (arm or experiment.arms[0]).model
            model = arm_model or model
            call.experiment = experiment.name if arm is not None else None
            call.arm = arm.name if arm is not None else None
        entry = self._pool.models().get(model)
        if entry is None:
            raise UnknownModel(f"there is no model {asked!r} here; GET /v1/models lists those there are", param="model")
        call.model = model
        # Whatever was asked for, more is never written: one absurd wish must not fill the line for everybody.
        call.new_tokens = min(call.new_tokens, entry.max_model_len or UNKNOWN_CONTEXT)
        call.model_config = {"root": entry.root, "parent": entry.parent, "max_model_len": entry.max_model_len}

    def _only_name(self, key: Key) -> str:
        """For a request that names no model: what this key may ask for, if that is one."""
        models = list(self._pool.models())
        if not models:
            raise NoBackend("no backend has told its models yet", retry_after_s=self._config.probe_interval_s or 1)
        names = [name for name in self.public_models() if key.may_use(name)]
        if not names:
            raise UnknownModel("model is missing, and no model that this key may use is here", param="model")
        if len(models) == 1 and models[0] in names:
            return models[0]  # the others are more names for it
        if len(names) == 1:
            return names[0]
        raise InvalidRequest(f"model is missing, and there are several: {', '.join(names)}", param="model")

    def identity(self, model: str) -> tuple[object, ...]:
        """What stands behind a name, for keys of caches."""
        entry = self._pool.models().get(model)
        return () if entry is None else entry.identity

    # -- backends

    def choose(self, call: Call, failed: list[Backend]) -> Route:
        """Raises `NoBackend`."""
        arm = self._arm(call)
        having = [backend for backend in self._pool.backends if call.model in backend.models]
        if arm is not None and arm.backend is not None:
            having = [backend for backend in having if backend.name == arm.backend]
        able = [backend for backend in having if backend.available and backend not in failed]
        answering = [backend for backend in able if backend.row.role != "prefill"]
        if not answering:
            raise self._nobody(call, having, failed)
        prefill = self._prefill(call, able)
        why = "experiment" if arm is not None and arm.backend is not None else "load" if len(having) > 1 else "only"
        fitting = self._fitting(call, answering)
        if len(fitting) < len(answering):
            why = "length"
        if len(fitting) == 1:
            return Route(fitting[0], why, prefill)
        if self._config.prefix_affinity and (home := self._home(call, fitting)) is not None:
            return Route(home, "prefix", prefill)
        return Route(_least(fitting), why, prefill)

    def _arm(self, call: Call) -> ArmRow | None:
        if call.experiment is None:
            return None
        for row in self._config.experiments:
            if row.name == call.experiment:
                return next(arm for arm in row.arms if arm.name == call.arm)
        return None

    def _fitting(self, call: Call, backends: list[Backend]) -> list[Backend]:
        """Of the length class; all, if nobody is."""
        wanted = "long" if call.prompt_tokens >= self._config.length_threshold else "short"
        return [backend for backend in backends if backend.row.length in ("any", wanted)] or backends

    def _prefill(self, call: Call, able: list[Backend]) -> Backend | None:
        if call.prompt_tokens < self._config.prefill_threshold:
            return None
        prefillers = [backend for backend in able if backend.row.role == "prefill"]
        return _least(prefillers) if prefillers else None

    def _home(self, call: Call, backends: list[Backend]) -> Backend | None:
        """Where the prompt's beginning is; None if that backend is too busy."""
        names = piece_names(call.prefix_text(PIECE_CHARS * MAX_PIECES), call.key.owner)
        by_name = {backend.name: backend for backend in backends}
        home, _ = self._prefixes.longest(names, set(by_name))
        home = home or first_home(names[0], by_name)
        backend = by_name[home]
        average = sum(each.load for each in backends) / len(backends)
        if backend.load > average * LOAD_FACTOR + LOAD_SLACK:
            backend = _least(backends)
            self._prefixes.remember(names, backend.name)
            return None
        self._prefixes.remember(names, backend.name)
        return backend

    def _nobody(self, call: Call, having: list[Backend], failed: list[Backend]) -> NoBackend:
        reasons = []
        for backend in having:
            if backend in failed:
                reasons.append(f"{backend.name} failed")
            elif backend.draining:
                reasons.append(f"{backend.name} is being drained")
            elif backend.unhealthy_reason is not None:
                reasons.append(f"{backend.name} is unhealthy_reason ({backend.unhealthy_reason})")
            elif not backend.breaker.allows:
                reasons.append(f"{backend.name} failed several times and is left alone for a while")
        waits = [backend.breaker.retry_after_s for backend in having if backend.breaker.retry_after_s]
        retry_after_s = min(waits, default=self._config.probe_interval_s or 1.0)
        return NoBackend(f"nobody can answer for {call.model} now: {'; '.join(reasons)}", retry_after_s=retry_after_s)


def _least(backends: list[Backend]) -> Backend:
    return min(backends, key=lambda backend: (backend.load, backend.num_sent))


@functools.lru_cache(maxsize=4096)
def salt_of(owner: str, secret: str) -> str:
    """What separates one owner's cached prefixes from another's inside an engine; not to be guessed from outside."""
    return hashlib.blake2b(owner.encode(), key=secret.encode()[:64], digest_size=16).hexdigest()
