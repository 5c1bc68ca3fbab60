"""`tonle simulate`: what servers would do under a load, without servers. The options of a load are those of `tonle bench`.

Exit status: 0 every request was answered and the SLO held, if one was given; with --find-replicas: a number was found · 1 not
so · 2 it could not start · 130 stopped with Ctrl-C, with the levels so far saved.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tonle.bench import BenchOptions, save_report
from tonle.bench.options import parse_numbers, parse_ramp
from tonle.bench.report import check_writable
from tonle.bench.slo import Slo
from tonle.bench.sweep import Saturation
from tonle.bench.tables import print_report
from tonle.cli.bench import ArrivalsName, SweepName, users_of
from tonle.cli.bench_data import with_data_flags
from tonle.cli.screen import show_error
from tonle.cli.slo_flags import with_slo_flags
from tonle.errors import ConfigError, TonleError
from tonle.simulate.explain import explain, fleet_settings, fleet_title, remarks
from tonle.simulate.fleet import Fleet, fleet_of
from tonle.simulate.fleet_file import read_fleet
from tonle.simulate.levels import FewestReplicas, SimulatedLevel, find_replicas, simulate_levels, simulated_report
from tonle.simulate.profile import Profile, load_profile, shipped_profiles
from tonle.simulate.tables import print_fewest, print_replicas

NOT_WELL = 1
COULD_NOT_START = 2
INTERRUPTED = 130

_servers = partial(typer.Option, rich_help_panel="Servers", show_default=False)
_load = partial(typer.Option, rich_help_panel="Load")
_report = partial(typer.Option, rich_help_panel="Report")

_PROFILE = "How long steps take: a file of `tonle profile`, or one that comes with Tonle. `--profile list` names those."
_FLEET = "Describe servers in a YAML file: roles, length classes, prices, autoscaling, failures (docs/simulation.md)."
_FIND = "Find the fewest replicas that hold the SLO, by doubling and halving."
_CONCURRENCY = (
    "Closed loop: N users, each waiting for an answer before the next request; 1,4,16 runs three levels. Default: 1."
)
_RATE = (
    "Open loop: N requests per second, sent whether or not earlier ones are answered; a list runs one level for each."
)
_SWEEP = "rate or concurrency: find the highest load that is kept up with, or at which the SLO holds."
_REQUESTS = (
    "Requests per level. Default: 4 per user but at least 8; with --rate, 20 s of arrivals; with --duration, no limit."
)


@with_data_flags(before="seed")
@with_slo_flags
def simulate(
    slo: Slo,
    data: dict[str, Any],
    profile: Annotated[str | None, _servers(metavar="NAME|FILE", help=_PROFILE)] = None,
    replicas: Annotated[
        int | None, _servers(metavar="N", help="So many servers, behind a gateway if more than one. Default: 1.")
    ] = None,
    find: Annotated[bool, _servers("--find-replicas", metavar="", help=_FIND)] = False,
    max_replicas: Annotated[
        int, _servers(metavar="N", help="With --find-replicas: no more than this. Default: 256.")
    ] = 256,
    fleet: Annotated[Path | None, _servers(metavar="FILE", help=_FLEET)] = None,
    max_num_seqs: Annotated[
        int | None, _servers(metavar="N", help="Requests per step of each server. Default: as profiled.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _servers(metavar="N", help="Tokens per step. Default: as profiled.")
    ] = None,
    long_prefill_tokens: Annotated[
        int | None,
        _servers(
            metavar="N",
            help="Tokens of one prompt per step, while others are present. Default: as profiled, or the same share.",
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None, _servers(metavar="N", help="Requests that the gateway sends to one server at once. Default: 48.")
    ] = None,
    max_queued: Annotated[
        int | None, _servers(metavar="N", help="Requests that may wait at the gateway for one server; more get 429.")
    ] = None,
    price_per_hour: Annotated[
        float, _servers(metavar="N", help="Of one server, for the cost per million tokens. Default: 0, not known.")
    ] = 0.0,
    concurrency: Annotated[str | None, _load(metavar="N,...", help=_CONCURRENCY)] = None,
    rate: Annotated[str | None, _load(metavar="N,...", help=_RATE)] = None,
    ramp: Annotated[
        str | None, _load(metavar="N-N", help="Open loop: a rate that rises, or falls, over --duration, such as 1-20.")
    ] = None,
    sweep: Annotated[SweepName | None, _load(metavar="NAME", help=_SWEEP)] = None,
    max_levels: Annotated[int, _load(metavar="N", help="Levels after which a sweep ends at the latest.")] = 16,
    arrivals: Annotated[
        ArrivalsName | None,
        _load(metavar="NAME", help="Open loop: gaps between requests: poisson, constant, or gamma."),
    ] = None,
    burstiness: Annotated[
        float | None, _load(metavar="N", help="Shape of gamma gaps: 1 is Poisson, less comes in bursts.")
    ] = None,
    requests: Annotated[int | None, _load(metavar="N", help=_REQUESTS)] = None,
    duration: Annotated[float | None, _load(metavar="N", help="Seconds per level; then no request is sent.")] = None,
    seed: Annotated[
        int, _load(metavar="N", help="The same seed gives the same requests as in `tonle bench`, and the same result.")
    ] = 0,
    json_file: Annotated[
        Path | None,
        _report("--json", metavar="FILE", help="Save the report: `tonle bench report` and `compare` read it."),
    ] = None,
    save_requests: Annotated[
        bool, _report("--save-requests/--no-save-requests", metavar="", help="One row per request in the saved report.")
    ] = True,
    explained: Annotated[
        bool, _report("--explain", metavar="", help="Say what is simulated, and what is not.")
    ] = False,
    quiet: Annotated[bool, _report("--quiet", "-q", metavar="", help="Print nothing but errors.")] = False,
) -> None:
    """Say what servers would do under a load: fewest replicas for an SLO, cost, without a server.

    The engine's own scheduler and the gateway's own routing run in virtual time.

    [dim]Example:[/dim]  tonle simulate --profile profile.json --replicas 4 --rate 20 --preset chat --ttft-p95 500ms

    Exit status: 0 all requests answered and the SLO held, 1 not so, 2 could not start, 130 stopped with Ctrl-C.
    """
    if profile == "list":
        typer.echo("\n".join(shipped_profiles()))
        return
    try:
        if json_file is not None:
            check_writable(json_file)
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "long_prefill_tokens": long_prefill_tokens,
        }
        servers, profiles = _servers_of(
            profile,
            fleet,
            replicas,
            {name: value for name, value in limits.items() if value is not None},
            price_per_hour,
        )
        gateway = {"max_concurrent": max_concurrent, "max_queued": max_queued}
        servers = _with_gateway(servers, gateway, wanted=find)
        options = BenchOptions(
            concurrency=users_of(concurrency, open_loop=rate or ramp),
            rates=() if rate is None else parse_numbers(rate, "rate"),
            ramp=None if ramp is None else parse_ramp(ramp, "ramp"),
            sweep=None if sweep is None else sweep.value,
            max_levels=max_levels,
            arrivals=None if arrivals is None else arrivals.value,
            burstiness=burstiness,
            requests=requests,
            duration_s=duration,
            warmup=0,
            slo=slo,
            seed=seed,
            keep_requests=save_requests,
            **data,
        )
        options.validate()
        servers.check()
        if find:
            _check_search(options, replicas, max_replicas)
        run = _Run(options, servers, profiles, None if quiet else Console(), json_file)
        run.explain(wanted=explained)
        status = run.find(max_replicas) if find else run.levels()
    except TonleError as error:
        show_error(error)
        raise typer.Exit(COULD_NOT_START) from None
    raise typer.Exit(status)


def _with_gateway(fleet: Fleet, settings: dict[str, Any], *, wanted: bool) -> Fleet:
    """With what was set of the gateway. If anything was, or it is `wanted`, one stands before a single server, too."""
    given = {name: value for name, value in settings.items() if value is not None}
    if (given or wanted) and fleet.gateway is None:
        given["gateway"] = True
    return replace(fleet, **given)


def _check_search(options: BenchOptions, replicas: int | None, max_replicas: int) -> None:
    """Of --find-replicas. Raises `ConfigError`."""
    if replicas is not None or options.sweep is not None:
        raise ConfigError("--find-replicas searches the number itself: give no --replicas and no --sweep",
                          param="find_replicas")  # fmt: skip
    if len(options.levels) > 1:
        raise ConfigError("--find-replicas looks at one load: give one number with --rate or --concurrency",
                          param="find_replicas")  # fmt: skip
    if max_replicas < 1:
        raise ConfigError(f"--max-replicas must be at least 1, not {max_replicas}", param="max_replicas")


def _servers_of(
    profile: str | None, file: Path | None, replicas: int | None, limits: dict[str, int], price_per_hour: float
) -> tuple[Fleet, list[Profile]]:
    """Raises `ConfigError`."""
    known = None if profile is None else load_profile(profile)
    for name, value in limits.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
    if file is not None:
        if replicas is not None or limits:
            raise ConfigError("the file says how many replicas there are and what their limits are: give --fleet alone",
                              param="fleet")  # fmt: skip
        return read_fleet(file, known, price_per_hour=price_per_hour)
    if known is None:
        names = ", ".join(shipped_profiles()) or "none yet"
        raise ConfigError(
            "give --profile: a file that `tonle profile` wrote, or the name of one that comes with Tonle "
            f"({names}); or --fleet FILE",
            param="profile",
        )
    one = 1 if replicas is None else replicas
    return fleet_of(known, replicas=one, price_per_hour=price_per_hour, **limits), [known]


class _Run:
    """One call of the verb, once its options are read."""

    def __init__(
        self,
        options: BenchOptions,
        fleet: Fleet,
        profiles: list[Profile],
        console: Console | None,
        json_file: Path | None,
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._profiles = profiles
        self._console = console
        self._json_file = json_file
        self._done: list[SimulatedLevel] = []

    def explain(self, *, wanted: bool) -> None:
        if wanted and self._console is not None:
            self._console.print(explain(self._options, self._fleet, self._profiles), highlight=False, markup=False)

    def levels(self) -> int:
        done, interrupted = self._done, False
        saturation, notes = None, list[str]()
        try:
            saturation, notes = simulate_levels(self._options, self._fleet, done.append)
        except KeyboardInterrupt:
            interrupted = True
        report = self._report(done, self._fleet, notes=notes, saturation=saturation, interrupted=interrupted)
        if self._console is not None:
            print_report(report, self._console)
            if done:
                _print_replicas(done, saturation, self._console)
        if interrupted:
            return INTERRUPTED
        if saturation is not None:
            return 0 if saturation.load is not None else NOT_WELL
        return 0 if report.ok and report.slo_held else NOT_WELL

    def find(self, most: int) -> int:
        try:
            found = find_replicas(self._options, self._fleet, most=most, watch=self._done.append)
        except KeyboardInterrupt:
            self._report(self._done, self._fleet, interrupted=True)
            return INTERRUPTED
        count = found.count or max(number for number, _ in found.levels)
        best = dict(found.levels)[count]
        report = self._report([best], self._fleet.resized(count), notes=_find_notes(found))
        if self._console is not None:
            print_report(report, self._console)
            print_replicas(best.result, self._console)
            print_fewest(found, self._options.slo, self._console)
        return NOT_WELL if found.count is None else 0

    def _report(
        self, levels: list[SimulatedLevel], fleet: Fleet, *, notes: list[str] | None = None, **more: Any
    ) -> Any:
        models = list(dict.fromkeys(profile.server.model for profile in self._profiles))
        report = simulated_report(
            self._options,
            levels,
            name=fleet_title(fleet, self._profiles),
            model=", ".join(models),
            settings=fleet_settings(fleet, self._profiles),
            notes=[*(notes or []), *(remarks(fleet, levels[-1].result) if levels else [])],
            **more,
        )
        if self._json_file is not None:
            save_report(report, self._json_file)
        return report


def _print_replicas(done: list[SimulatedLevel], saturation: Saturation | None, console: Console) -> None:
    """Of the load that a sweep found; else of the last level."""
    found = None if saturation is None else saturation.load
    chosen = next((each for each in done if found is not None and each.load == found), done[-1])
    print_replicas(chosen.result, console, of=chosen.level.label if len(done) > 1 else None)


def _find_notes(found: FewestReplicas) -> list[str]:
    if found.is_monotonic:
        return []
    return ["more replicas did not always hold the SLO better: the load is close to the limit, and chance decides; repeat with "
            "another --seed and more --requests"]  # fmt: skip
