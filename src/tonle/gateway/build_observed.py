"""`Observed` of a server from its settings, and what keeps it informed.

Does: decide what is watched and where it is kept. Does not: take part in a request (`observing.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from tonle.config.gateway import GatewayConfig
from tonle.config.observe import HISTORY_MEMORY
from tonle.config.state_dir import state_dir
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.scraper import Scraper, local_state
from tonle.observe.alerts import Alerts
from tonle.observe.history import History
from tonle.observe.observed import Observed
from tonle.observe.sampler import Sampler
from tonle.observe.sla import Sla
from tonle.observe.webhook import Webhook
from tonle.telemetry.metrics import Metrics

log = logging.getLogger("tonle.gateway")


def build_observed(
    config: GatewayConfig, backends: list[Backend], local: Metrics | None, sla: Sla, alerts: Alerts | None = None
) -> tuple[Observed | None, Scraper | None]:
    """`local`: of the engine in this process. With several front ends there is nothing: none of them sees all requests."""
    if local is not None and local.shared:
        return None, None
    sampler = Sampler(
        backends,
        read_local=None if local is None else lambda: local_state(backends[0].name, local),
        gaps=None if local is None else local.itl,
        burn_rate=lambda: sla.verdict().burn_rate,
        patience_s=config.sla_p95_s,
    )
    observed = Observed(
        sla=sla, sampler=sampler, history=History(_history_path(config)), alerts=alerts, keeps=config.dashboard
    )
    return observed, Scraper(backends, sampler, local) if observed.keeps else None


def build_alerts(config: GatewayConfig) -> Alerts:
    """Raises `ConfigError`."""
    return Alerts(None if config.alert_webhook is None else Webhook(config.alert_webhook, config.alert_secret))


def _history_path(config: GatewayConfig) -> Path | None:
    """None: in memory. The default file is named after the port: servers of one machine have one each."""
    if config.history_db == HISTORY_MEMORY or not config.dashboard:
        return None
    if config.history_db is not None:
        return Path(config.history_db)
    if not config.port:
        return None
    try:
        return state_dir() / f"history-{config.port}.db"
    except RuntimeError:  # a user without a home directory
        log.warning(
            "figures and usage are kept in memory: there is no home directory; set history_db or XDG_STATE_HOME"
        )
        return None
