"""`Search`: asks Optuna which settings to try next, and tells it what came of them.

Does: propose settings that were not tried yet, the default first. Does not: try them. The same seed and the same answers give the
same proposals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tonle.errors import ConfigError
from tonle.tune.space import Choice, Settings, key_of

if TYPE_CHECKING:
    import optuna

DEFAULT = "default"  # the value of a knob that is not set
_REPEATS = 3  # proposals in a row that were tried before: then a neighbour of the best is taken


def optuna_module() -> Any:
    """Raises `ConfigError` that says how to install it."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError(
            "`tonle tune` searches with Optuna, which is not installed: pip install 'tonle[tune]'", param="optuna"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Search:
    """Tree-structured Parzen estimators over a grid. `first`: settings to try before the optimizer chooses."""

    def __init__(
        self, knobs: Sequence[Choice], *, seed: int, first: Sequence[Settings] = (), warm_up: int = 20
    ) -> None:
        self._optuna = optuna_module()
        self._knobs = list(knobs)
        kind = self._optuna.distributions.CategoricalDistribution
        self._space = {knob.name: kind([DEFAULT, *map(str, knob.values)]) for knob in knobs}
        self._values = {knob.name: {str(value): value for value in knob.values} for knob in knobs}
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=warm_up, multivariate=True)
        with _quiet():
            self._study: optuna.Study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._first = [{}, *first]
        self._seen: set[str] = set()
        self._scores: list[tuple[float, Settings]] = []
        self._open: dict[str, Any] = {}  # trials asked for, by settings

    @property
    def size(self) -> int:
        """Of the grid."""
        total = 1
        for knob in self._knobs:
            total *= len(knob.values) + 1
        return total

    def ask(self) -> Settings | None:
        """Settings to try; None: all were."""
        while self._first:
            settings = self._first.pop(0)
            if key_of(settings) not in self._seen and self._fits(settings):
                self._seen.add(key_of(settings))
                return settings
        for _ in range(_REPEATS):
            with _quiet():
                trial = self._study.ask(self._space)
            settings = self._settings(trial.params)
            if key_of(settings) not in self._seen:
                self._seen.add(key_of(settings))
                self._open[key_of(settings)] = trial
                return settings
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return self._next_untried()

    def _neighbours(self, settings: Settings) -> Iterator[Settings]:
        """One value of one knob further, up or down, or without it."""
        for knob in self._knobs:
            values = [None, *knob.values]
            place = values.index(settings.get(knob.name))
            for other in (place - 1, place + 1, 0):
                if 0 <= other < len(values):
                    changed = {**settings, knob.name: values[other]}
                    yield {name: value for name, value in changed.items() if value is not None}

    def tell(self, settings: Settings, score: float | None) -> None:
        """None: the server did not start or no request was answered."""
        self._seen.add(key_of(settings))
        if score is not None and self._fits(settings):
            self._scores.append((score, settings))
        trial = self._open.pop(key_of(settings), None)
        state = self._optuna.trial.TrialState
        if trial is not None:
            self._study.tell(trial, score, state=state.COMPLETE if score is not None else state.FAIL)
        elif score is not None and self._fits(settings):
            params = {name: str(settings.get(name, DEFAULT)) for name in self._space}
            made = self._optuna.trial.create_trial(params=params, distributions=self._space, value=score)
            self._study.add_trial(made)

    def _settings(self, params: dict[str, str]) -> Settings:
        return {name: self._values[name][text] for name, text in params.items() if text != DEFAULT}

    def _fits(self, settings: Settings) -> bool:
        return all(str(value) in self._values.get(name, ()) for name, value in settings.items())

    def grid(self) -> Iterator[Settings]:
        """All settings, the default first."""
        names = [knob.name for knob in self._knobs]
        for values in itertools.product(*([None, *knob.values] for knob in self._knobs)):
            yield {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def _next_untried(self) -> Settings | None:
        """Beside the best, the second best …; what is left of the grid after them."""
        ranked = sorted(self._scores, key=lambda each: each[0], reverse=True)
        near = (other for _, settings in ranked for other in self._neighbours(settings))
        for settings in itertools.chain(near, self.grid()):
            if key_of(settings) not in self._seen:
                self._seen.add(key_of(settings))
                return settings
        return None


def _quiet() -> Any:
    """Without Optuna's remarks that an option is experimental."""
    import warnings

    return warnings.catch_warnings(action="ignore")
