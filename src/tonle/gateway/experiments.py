"""Experiments over HTTP: what they are, what the audit trail says of their arms, start and stop.

Does: list, report, start, stop. Does not: assign requests (`routing/router.py`), compute (`comparison.py`), or change settings:
an experiment that was stopped runs again after a restart.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import msgspec

from tonle.audit.trail import AuditTrail
from tonle.config.routing import ExperimentConfig
from tonle.edge.exchange import Exchange
from tonle.errors import NotFound
from tonle.gateway.comparison import MEASURES, ArmResult, Comparison, compare, wilson
from tonle.gateway.dashboard.background import in_turn
from tonle.gateway.experiment_records import ExperimentRecords
from tonle.gateway.routing.router import Router

PATH = "/admin/experiments"
FRESH_S = 5.0  # how long a report is shown before the trail is read again


class Experiments:
    def __init__(self, rows: tuple[ExperimentConfig, ...], router: Router, trail: AuditTrail | None) -> None:
        self._rows = rows
        self._router = router
        self._records = None if trail is None else ExperimentRecords(trail.options.directory)
        self._reading = asyncio.Lock()
        self._reports: dict[str, dict[str, Any]] = {}
        self._read_s = float("-inf")

    async def list_all(self, exchange: Exchange) -> None:
        reports = await self._all_reports()
        shown = [self._shown(row) | {"report": reports.get(row.name, _report(row, {}))} for row in self._rows]
        exchange.reply(msgspec.json.encode({"experiments": shown, "has_records": self._records is not None}))

    async def start(self, exchange: Exchange) -> None:
        row = self._named(exchange.path)
        self._router.start_experiment(row.name)
        exchange.reply(msgspec.json.encode(self._shown(row)))

    async def stop(self, exchange: Exchange) -> None:
        row = self._named(exchange.path)
        self._router.stop_experiment(row.name)
        exchange.reply(msgspec.json.encode(self._shown(row)))

    def _named(self, path: str) -> ExperimentConfig:
        """Raises `NotFound`."""
        name = path.removeprefix(f"{PATH}/").rpartition("/")[0]
        for row in self._rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self._rows) or "none"
        raise NotFound(f"there is no experiment {name[:100]!r}; the settings have: {names}")

    def _shown(self, row: ExperimentConfig) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(row)
        return shown | {"running": self._router.is_running(row.name)}

    async def _all_reports(self) -> dict[str, dict[str, Any]]:
        """One reader at a time; those who wait for it get what it read."""
        if self._records is not None and self._rows:
            await in_turn(self._reading, functools.partial(self._read, self._records), "tonle-experiments")
        return self._reports

    def _read(self, records: ExperimentRecords) -> None:
        """On a thread."""
        if time.monotonic() - self._read_s <= FRESH_S:
            return
        records.update()
        self._reports = {
            row.name: _report(row, records.arms.get(row.name, {})) | {"complete": records.is_complete}
            for row in self._rows
        }
        self._read_s = time.monotonic()


def _report(row: ExperimentConfig, found: dict[str, ArmResult]) -> dict[str, Any]:
    """Arms in the order of the settings, the first of which the others are compared with."""
    arms = {arm.name: found.get(arm.name, ArmResult(arm.name)) for arm in row.arms}
    return {
        "arms": [_shown_arm(arm) for arm in arms.values()],
        "comparisons": [shown_comparison(each) for each in compare(arms, row.arms[0].name)],
    }


def _shown_arm(arm: ArmResult) -> dict[str, Any]:
    means = {name: arm.measures[name].mean if name in arm.measures else None for name in MEASURES}
    return {
        "name": arm.name,
        "requests": arm.num_requests,
        "failure_rate": arm.failure_rate if arm.num_requests else None,
        "failure_interval": wilson(arm.num_failed, arm.num_requests),
    } | means


def shown_comparison(each: Comparison) -> dict[str, Any]:
    return {
        "arm": each.arm,
        "measure": each.measure,
        "control": each.control,
        "value": each.value,
        "difference": each.difference,
        "interval": each.interval,
        "p_value": each.p_value,
        "significant": each.significant,
    }
