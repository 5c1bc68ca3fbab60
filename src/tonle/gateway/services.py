"""`Services`: what the handlers of the gateway's paths need.

Does: hold. Does not: build (`gateway.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonle.audit.trail import AuditTrail
from tonle.config.gateway import GatewayConfig
from tonle.gateway.adapters import AdapterAdmin
from tonle.gateway.admin import Admin
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.apis.responses.api import ResponsesApi
from tonle.gateway.auth import Auth
from tonle.gateway.backend_admin import BackendAdmin
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.dashboard.sessions import Sessions
from tonle.gateway.experiments import Experiments
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.limits.shared_limiter import SharedLimiter
from tonle.gateway.pipeline import Pipeline
from tonle.gateway.proxies import Proxies
from tonle.gateway.routing.router import Router
from tonle.gateway.sleep_pages import Sleeper
from tonle.observe.observed import Observed
from tonle.protocol.media_paths import MEDIA_PATHS
from tonle.telemetry.metrics import Metrics


@dataclass(slots=True, kw_only=True)
class Services:
    """What the handlers need."""

    config: GatewayConfig
    auth: Auth
    ring: KeyRing
    pipeline: Pipeline
    router: Router
    pool: BackendPool
    replay: CachedReplies
    metrics: GatewayMetrics
    admin: Admin
    backend_admin: BackendAdmin
    adapters: AdapterAdmin
    experiments: Experiments
    sessions: Sessions
    responses: ResponsesApi
    proxies: Proxies
    is_open: Callable[[], bool]  # False while it is being stopped
    trail: AuditTrail | None = None
    shared: SharedLimiter | None = None  # where limits are shared with other gateways
    is_local: bool = False  # an engine or worker pools of this process are in place of backends
    local_metrics: Metrics | None = None  # of such an engine
    observed: Observed | None = None  # None: of several front ends none sees all requests
    enable_lora: bool = False  # with such an engine and without keys, every caller may load and remove adapters
    trust_salt: bool = False  # X-Tonle-Salt of the caller, a gateway, says whose request it is
    sleeper: Sleeper | None = None  # of such an engine
    media_paths: tuple[str, ...] = MEDIA_PATHS  # that are answered; of such a server, those of its worker pools
    request_of: Callable[[int], str | None] | None = None  # the request that a handle of such an engine belongs to
