"""Which values the next trial has, and whether one is cut short: Optuna's samplers and pruners, asked anew each time.

Each question is answered by a study that is built from the journal, with a seed of the search's seed and the trial's
number. So a killed search
asks as an undisturbed one would.
"""

import hashlib
import importlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

from phalanx.errors import ConfigError
from phalanx.sweep.config import SpaceConfig, SweepConfig, Value, as_numbers
from phalanx.sweep.journal import Trial


def choose_values(sweep: SweepConfig, trials: Sequence[Trial]) -> dict[str, Value]:
    """Return the values of the next trial.

    Raises:
        ConfigError: Optuna, or SciPy, is not installed.
    """
    number = len(trials)
    if sweep.sampler == "grid":
        return sweep.grid_point(number)
    if number < num_startup(sweep):
        return _spread_point(sweep, number)
    study = _build_study(sweep, trials)
    return as_numbers(study.ask(_distributions(sweep)).params)


def is_hopeless(sweep: SweepConfig, trials: Sequence[Trial], trial: Trial, num_steps: int) -> bool:
    """Whether a running trial is cut short after so many steps; a killed process may have reported later steps."""
    reports = [(step, loss) for step, loss in sorted(trial.reports.items()) if step <= num_steps]
    if sweep.pruner == "none" or not reports:
        return False
    study = _build_study(sweep, [other for other in trials if other.number < trial.number])
    study.enqueue_trial(trial.values)
    asked = study.ask(_distributions(sweep))
    for step, loss in reports:
        asked.report(loss, step)
    return bool(asked.should_prune())


def num_startup(sweep: SweepConfig) -> int:
    """Return how many trials are spread evenly before a sampler that learns has enough to learn from."""
    if sweep.sampler == "random":
        return 0
    return max(4, 2 * len(sweep.space)) if sweep.sampler == "gp" else max(6, 2 * len(sweep.space))


def _build_study(sweep: SweepConfig, trials: Sequence[Trial]) -> Any:
    optuna = _import_extra("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed = _derive_seed(sweep.seed, len(trials))
    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_startup(sweep)),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=1, deterministic_objective=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "grid": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    pruners = {
        "none": optuna.pruners.NopPruner,
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
        # no halving: it keeps its rungs in the study, and a study here is built anew
        "third": lambda: optuna.pruners.PercentilePruner(100 / 3, n_startup_trials=4),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=samplers[sweep.sampler](), pruner=pruners[sweep.pruner]())
    spaces = _distributions(sweep)
    losses = [trial.loss for trial in trials if trial.loss is not None]
    # a trial that gave no number, or was refused, is worse than all that gave one
    worst = max(losses, default=0.0) + 1.0
    for trial in trials:
        is_pruned = trial.state == "pruned"
        reports = {step: loss if math.isfinite(loss) else worst for step, loss in trial.reports.items()}
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED if is_pruned else optuna.trial.TrialState.COMPLETE,
                value=None if is_pruned else worst if trial.loss is None else trial.loss,
                params=trial.values,
                distributions=spaces,
                intermediate_values=reports,
            )
        )
    return study


def _distributions(sweep: SweepConfig) -> dict[str, Any]:
    optuna = _import_extra("optuna")

    def distribution(values: SpaceConfig) -> Any:
        if values.choices:
            return optuna.distributions.CategoricalDistribution(values.choices)
        is_whole = isinstance(values.low, int) and isinstance(values.high, int)
        kind = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
        return kind(values.low, values.high, log=values.log)

    return {key: distribution(values) for key, values in sweep.space.items()}


def _spread_point(sweep: SweepConfig, number: int) -> dict[str, Value]:
    """Return a point of a scrambled Halton sequence over the space."""
    qmc = _import_extra("scipy.stats").qmc
    shares = qmc.Halton(d=len(sweep.space), rng=sweep.seed).random(number + 1)[number]
    return {
        key: _value_at(values, float(share)) for (key, values), share in zip(sweep.space.items(), shares, strict=True)
    }


def _value_at(values: SpaceConfig, share: float) -> Value:
    if values.choices:
        return values.choices[min(int(share * len(values.choices)), len(values.choices) - 1)]
    low, high = values.low or 0, values.high or 0
    is_whole = isinstance(low, int) and isinstance(high, int)
    # every whole number has an equal part
    top = high + 1 if is_whole else high
    place = math.exp(_between(math.log(low), math.log(top), share)) if values.log else _between(low, top, share)
    return min(int(place), int(high)) if is_whole else place


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)


def _derive_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"phalanx sweep {seed} {number}".encode()).digest()[:4], "big")


def _import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"phalanx sweep: needs {name}, which is not installed; install phalanx-train[sweep]") from exc
