"""Resolve and choose: the model behind a name, and the backend that gets a request.

Does: aliases, experiments, the order of the routing policies; say why a backend was chosen, or why none can be. Does
not: send, wait or count failures.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import ArmConfig, ExperimentConfig
from tonle.errors import InvalidRequest, UnknownModel
from tonle.gateway.api_keys.key import Key
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.refusals import NoBackend
from tonle.gateway.routing.fallbacks import Fallbacks
from tonle.gateway.routing.held_blocks import HeldBlocks
from tonle.gateway.routing.policies import (
    ByLength,
    ByPrefix,
    ByRegion,
    ByRole,
    Candidates,
    Policy,
    RouteRequest,
    by_load,
    by_share,
    has_model,
    is_available,
    not_passed,
    of_arm,
)
from tonle.gateway.stage_results import AcceptedRequest, ResolvedModel, Route
from tonle.protocol.adapters import unknown_model
from tonle.protocol.media_paths import WORKERS
from tonle.protocol.replies import ModelEntry

MAX_HINTED = 8  # models named in an error
UNKNOWN_CONTEXT = 131_072  # tokens: the assumed context of a backend that does not report one


class Router:
    def __init__(
        self,
        pool: BackendPool,
        config: GatewayConfig,
        held: HeldBlocks | None = None,
        default_model: Callable[[str], str | None] | None = None,
    ) -> None:
        """`held`: what backends say of their KV blocks; None: where a prompt's are is guessed. `default_model`: by path, of
        requests that name none, where several models of this process answer different paths."""
        self._default_model = default_model
        self._pool = pool
        self._config = config
        self._aliases = dict(config.aliases)
        self.fallbacks = Fallbacks(dict(config.fallbacks), self._aliases)
        self._experiments: dict[str, ExperimentConfig] = {row.model: row for row in config.experiments}
        self._stopped: set[str] = set()  # names of experiments that take no part for now
        self._by_prefix = ByPrefix(held)
        self._last_rule = ByRole(config.prefill_threshold)  # the policies after it are preferences
        self.policies: tuple[Policy, ...] = (
            has_model,
            is_available,
            not_passed,
            of_arm,
            *([ByRegion(config.region, config.region_order)] if config.region is not None else []),
            self._last_rule,
            by_share,
            ByLength(config.length_threshold),
            *([self._by_prefix] if config.prefix_affinity else []),
            by_load,
        )

    # -- names

    def public_models(self, passed: Collection[str] = ()) -> dict[str, ModelEntry]:
        """What callers may ask for: the backends' models, aliases, and models of experiments.

        `passed`: gateways, if another gateway asks. It is told of no model that it told us of, and of none of other regions,
        where it asks for itself: else gateways would tell each other for ever of a model that no server has any more.
        """

        def is_own(backend: Backend) -> bool:
            is_gateway = backend.gateway_id is not None
            return not is_gateway or (backend.gateway_id not in passed and backend.region == self._config.region)

        models = self._pool.models(is_own) if passed else self._pool.models()
        for public, model in self._aliases.items():
            if model in models:
                models[public] = models[model]
        for experiment in self._config.experiments:
            first = experiment.arms[0].model
            if experiment.model not in models and first in models:
                models[experiment.model] = models[first]
        return models

    def resolve(self, key: Key, request: ParsedRequest, path: str = "") -> ResolvedModel:
        """The model or adapter behind the name, and the arm of an experiment. Raises `UnknownModel`, `InvalidRequest`."""
        asked = request.asked_model or self._only_name(key, path)
        model = self._aliases.get(asked, asked)
        experiment = self._experiments.get(asked) or self._experiments.get(model)
        arm = None
        if experiment is not None:
            arm = None if experiment.name in self._stopped else assign(experiment, subject_of(key, request))
            served = (arm or experiment.arms[0]).model or model
            model = self._aliases.get(served, served)
        entry = self._pool.entry(model)
        if entry is None:
            if (other := next(self._in_place_of(key, request, (asked, model)), None)) is not None:
                return other
            raise unknown_model(asked, self._hint(key))
        name = experiment.name if experiment is not None and arm is not None else None
        return ResolvedModel(asked, model, entry, _new_tokens(request, entry), name, arm)

    def in_place_of(self, accepted: AcceptedRequest) -> Iterator[ResolvedModel]:
        """The models that may answer for the one of this request if its backends are out, best first."""
        model = accepted.model
        return self._in_place_of(accepted.key, accepted.request, (model.asked, model.name), model.fallback)

    def _in_place_of(
        self, key: Key, request: ParsedRequest, names: tuple[str, str], last: str | None = None
    ) -> Iterator[ResolvedModel]:
        """Those that the key may use and some backend has."""
        for public in self.fallbacks.after(names, last):
            model = self._aliases.get(public, public)
            entry = self._pool.entry(model) if key.may_use(public) else None
            if entry is not None:
                yield ResolvedModel(names[0], model, entry, _new_tokens(request, entry), fallback=public)

    def _hint(self, key: Key) -> str:
        """Which models a caller may ask for instead."""
        names = [name for name in self.public_models() if key.may_use(name)]
        few = 0 < len(names) <= MAX_HINTED
        return f"this server has {', '.join(names)}" if few else "GET /v1/models lists the models"

    def _only_name(self, key: Key, path: str) -> str:
        """For a request that names no model: what this key may ask for, if that is one."""
        default = None if self._default_model is None else self._default_model(path)
        if default is not None and key.may_use(default):
            return default
        models = self._pool.models()
        if path.startswith(WORKERS) and (worker := path.removeprefix(WORKERS)) in models and key.may_use(worker):
            return worker
        if not models:
            raise NoBackend("no backend has listed its models yet", retry_after_s=self._config.probe_interval_s or 1)
        names = [name for name in self.public_models() if key.may_use(name)]
        if not names:
            raise UnknownModel("model is missing, and this key may use no model that is served here", param="model")
        bases = {name: entry.root or name for name, entry in models.items() if not entry.parent}
        if len(set(bases.values())) == 1 and (own := [name for name in bases if name in names]):
            return own[0]  # the others are more names for it, or its adapters
        if len(names) == 1:
            return names[0]
        raise InvalidRequest(f"model is missing, and there are several: {', '.join(names)}", param="model")

    # -- experiments

    def is_running(self, experiment: str) -> bool:
        return experiment not in self._stopped

    def start_experiment(self, name: str) -> None:
        self._stopped.discard(name)

    def stop_experiment(self, name: str) -> None:
        """Requests are served as if there were none, until it is started again or this process is."""
        self._stopped.add(name)

    # -- backends

    def learn(self, accepted: AcceptedRequest, backend: str, kv_blocks: str) -> None:
        """`kv_blocks`: of the prompt, as the backend that answered it tells."""
        self._by_prefix.learn(accepted, backend, kv_blocks)

    def refresh_soon(self, backend: str) -> None:
        """Have it list its models again."""
        self._pool.refresh_soon(backend)

    def choose(self, accepted: AcceptedRequest, failed: list[Backend]) -> Route:
        """Raises `NoBackend`. A backend that is paused for this caller alone is the last choice, not left out."""
        paused = [backend for backend in self._pool.backends if not backend.breaker.allows_for(accepted.owner)]
        if paused:
            with contextlib.suppress(NoBackend):
                return self._choose(accepted, [*failed, *paused])
        return self._choose(accepted, failed)

    def _choose(self, accepted: AcceptedRequest, failed: list[Backend]) -> Route:
        request = RouteRequest(accepted, failed)
        candidates = Candidates(self._pool.backends, "only")
        for policy in self.policies:
            candidates = policy(candidates, request)
            if not candidates.backends:
                raise self._none_left(request)
            if policy is self._last_rule and len(candidates.backends) == 1:
                break  # what follows chooses among several
        (backend,) = candidates.backends
        return Route(backend, candidates.why, candidates.prefill)

    def _none_left(self, request: RouteRequest) -> NoBackend:
        """Says of each backend that has the model why it cannot be used."""
        having = of_arm(has_model(Candidates(self._pool.backends, ""), request), request).backends
        reasons = [reason for backend in having if (reason := _why_not(backend, request)) is not None]
        waits = [backend.breaker.retry_after_s for backend in having if backend.breaker.retry_after_s]
        retry_after_s = min(waits, default=self._config.probe_interval_s or 1.0)
        model = request.accepted.model
        if model.arm is not None and model.arm.backend is not None:
            arm = f"the arm {model.arm.name} of the experiment {model.experiment} names {model.arm.backend}"
            if self._pool.find(model.arm.backend) is None:
                reasons = [f"{arm}, which is not there"]
            else:
                reasons = [f"{arm} alone", *(reasons or [f"{model.arm.backend} does not have the model"])]
        because = f": {'; '.join(reasons)}" if reasons else ""
        return NoBackend(f"no healthy backend for {model.name}{because}", retry_after_s=retry_after_s)


def _new_tokens(request: ParsedRequest, entry: ModelEntry) -> int:
    """However many tokens are asked for, the model writes no more: one absurd number must not fill the queue."""
    return min(request.new_tokens, entry.max_model_len or UNKNOWN_CONTEXT) * request.num_answers


def _why_not(backend: Backend, request: RouteRequest) -> str | None:
    if backend in request.failed:
        return f"{backend.name} failed"
    if backend.gateway_id is not None and backend.gateway_id in request.accepted.passed:
        return f"{backend.name} is a gateway that the request has passed"
    if backend.row.role == "prefill":
        return f"{backend.name} does prefill only"
    if backend.leaving:
        return f"{backend.name} is being removed"
    if backend.draining:
        return f"{backend.name} is being drained"
    if backend.unhealthy_reason is not None:
        return f"{backend.name} is unhealthy ({backend.unhealthy_reason})"
    if not backend.breaker.allows:
        return f"{backend.name} failed several times in a row and is paused"
    return None


def subject_of(key: Key, request: ParsedRequest) -> str:
    """What stays in one arm of an experiment: the user the caller names, else the key."""
    return f"{key.id}/{request.user}" if request.user is not None else key.id


def assign(experiment: ExperimentConfig, subject: str) -> ArmConfig | None:
    """The arm of a subject: a pure function of its name, so it never changes. None: not part of the experiment."""
    if _draw(experiment.name, "share", subject) >= experiment.share:
        return None
    place = _draw(experiment.name, "arm", subject) * sum(arm.weight for arm in experiment.arms)
    for arm in experiment.arms:
        place -= arm.weight
        if place < 0:
            return arm
    return experiment.arms[-1]


def _draw(experiment: str, purpose: str, subject: str) -> float:
    """Uniform in [0, 1), the same for the same words."""
    digest = hashlib.blake2b(f"{experiment}\0{purpose}\0{subject}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@functools.lru_cache(maxsize=4096)
def salt_of(owner: str, secret: str) -> str:
    """Separates one owner's cached prefixes from another's inside an engine; cannot be guessed from outside."""
    return hashlib.blake2b(owner.encode(), key=secret.encode()[:64], digest_size=16).hexdigest()
