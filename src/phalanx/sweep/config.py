"""The sweep file: which keys of a run file are tried, how trials are chosen and cut short, and who wins."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from phalanx.config import StrictModel, digest_config, load_config
from phalanx.data.config import HELD_OUT
from phalanx.errors import ConfigError
from phalanx.train import DomainRun, PipelineRun, load_run

TrialRun = PipelineRun | DomainRun
"""Runs whose checkpoints their owner can open and measure alone."""

Value = bool | int | float | str
_LEARNED = ("causal_lm", "weighted_causal_lm")


class SpaceConfig(StrictModel):
    """The values of one key of the run file: a list, or a range."""

    choices: tuple[Value, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    """Whether a range is even in its logarithm."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        has_range = self.low is not None and self.high is not None
        if bool(self.choices) == has_range or (self.low is None) != (self.high is None):
            raise ValueError("expected either choices, or low and high; give one of them")
        if self.choices and (self.log or len(set(map(str, self.choices))) < 2):
            raise ValueError("choices: expected at least two different ones, and no log")
        if self.low is not None and self.high is not None:
            if not self.low < self.high:
                raise ValueError(f"low = {self.low} is not below high = {self.high}; swap them")
            if self.log and self.low <= 0:
                raise ValueError(f"low = {self.low}: a logarithm needs a number above 0")
        return self

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that the run file must allow: all choices, or both ends."""
        return self.choices or tuple(limit for limit in (self.low, self.high) if limit is not None)


class AgainConfig(StrictModel):
    """How the best trials are measured again before one of them wins."""

    best: int = Field(default=3, ge=1, le=100)
    """So many of the best trials are trained again."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(default=(1, 2), min_length=1, max_length=20)
    """Of the runs that train them again; other seeds than the run file's."""
    on: str | None = None
    """Validation set that decides; left out, that of the trials. Text that no trial was chosen by is better."""


class SweepConfig(StrictModel):
    """One search.

    Attributes:
        run: The run file, beside the sweep file.
    """

    run: Path
    trials: int = Field(default=20, ge=1, le=10_000)
    max_steps: int | None = Field(default=None, ge=1)
    """Limit of the optimizer steps of all trials together; training the best ones again counts too."""
    jobs: int = Field(default=1, ge=1, le=64)
    """Trials that are trained at once, each in a process of its own."""
    max_memory_mib: int | None = Field(default=None, ge=1)
    """Of all processes of a trial, and of all trials at once, by the planner's estimate; left out, the memory of this
    machine."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    sampler: Literal["tpe", "gp", "random", "grid"] = "tpe"
    """`tpe` and `gp` learn from earlier trials (trees of densities; a Gaussian process, better for a few numbers and
    trials); `grid` tries every combination of choices."""
    pruner: Literal["none", "median", "third"] = "none"
    """Ends a trial at a validation where it is above the median of the others, or not in the best third."""
    on: str = HELD_OUT
    """Validation set by whose loss trials are chosen; left out, the held-out share."""
    space: dict[str, SpaceConfig] = Field(min_length=1, max_length=50)
    """Values by key of the run file, such as ``"optimizer.lr"``."""
    again: AgainConfig = AgainConfig()
    _home: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def _check_space(self) -> Self:
        if self.sampler == "grid" and any(not values.choices for values in self.space.values()):
            raise ValueError('sampler = "grid" needs choices for every key; give choices, or use another sampler')
        if "train.seed" in self.space:
            raise ValueError("space: train.seed would choose the luckiest trial; remove it, and see again.seeds")
        return self

    @property
    def num_trials(self) -> int:
        """Trials of the search, fewer where a grid has no more."""
        if self.sampler != "grid":
            return self.trials
        size = 1
        for values in self.space.values():
            size *= len(values.choices)
        return min(self.trials, size)

    def grid_point(self, number: int) -> dict[str, Value]:
        """Return the trial of a grid with this number."""
        points = itertools.product(*(values.choices for values in self.space.values()))
        return dict(zip(self.space, next(itertools.islice(points, number, None)), strict=True))

    def search_digest(self) -> str:
        """Digest of the run file and of every key that losses depend on, without the limits of trials and steps."""
        again = AgainConfig(on=self.again.on)
        longer = self.model_copy(update={"trials": 1, "jobs": 1, "max_steps": None, "again": again})
        return f"{digest_config(longer)}:{digest_config(self.make_run({}))}"

    def bound_steps(self) -> tuple[int, int]:
        """Return the steps of the longest trial and of all runs that train the best ones again."""
        lengths = self.space.get("train.steps", SpaceConfig(low=0, high=1)).ends
        longest = max(self.make_run({}).train.steps, *map(int, lengths))
        return longest, longest * min(self.again.best, self.num_trials) * len(self.again.seeds)

    def make_run(self, values: Mapping[str, Value], seed: int | None = None) -> TrialRun:
        """Return the run of a trial, checked as a run file.

        Raises:
            ConfigError: The values do not go together.
        """
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        run = load_run(self._home / self.run, [*overrides, *([] if seed is None else [f"train.seed={seed}"])])
        if not isinstance(run, PipelineRun | DomainRun):
            raise ConfigError(
                f"{self.run}: phalanx sweep needs [pipeline] or [parallel]; other engines keep "
                "parts of the model from its owner"
            )
        if run.train.objective_kind not in _LEARNED:
            raise ConfigError(
                f'{self.run}: train.objective = "{run.train.objective_kind}": trials are compared by the '
                "loss of the next token; use phalanx train, then phalanx compare"
            )
        if run.train.early_stopping is not None:
            raise ConfigError(
                f"{self.run}: train.early_stopping would end trials at other steps than they are measured at; remove "
                "it, and set pruner"
            )
        return run

    def placed_at(self, home: Path) -> Self:
        """Return the same search with the directory of its file."""
        placed = self.model_copy()
        placed._home = home
        return placed


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file, and check every value of it against the run file.

    Raises:
        ConfigError: Names the file, the key and the choices.
    """
    sweep = load_config(path, SweepConfig, overrides).placed_at(path.parent)
    run = sweep.make_run({})
    run.require_steps("phalanx sweep")
    if sweep.jobs > 1 and run.own_code:
        raise ConfigError(
            f"{path}: jobs = {sweep.jobs}: trials in processes of their own have no {run.own_code[0]}; set jobs = 1"
        ).with_facts(file=str(path), key="jobs")
    _check_choice(path, "on", sweep.on, run.data.validation_names)
    _check_choice(path, "again.on", sweep.again.on or sweep.on, run.data.validation_names)
    if run.train.seed in sweep.again.seeds:
        raise ConfigError(f"{path}: again.seeds has the run file's own seed {run.train.seed}; give others")
    if sweep.pruner != "none" and not run.train.validate_every:
        raise ConfigError(
            f'{path}: pruner = "{sweep.pruner}" needs validations; set train.validate_every in {sweep.run}'
        )
    if sweep.max_steps is not None and sweep.max_steps < (min_steps := sum(sweep.bound_steps())):
        raise ConfigError(
            f"{path}: max_steps = {sweep.max_steps}, but one trial and those that are trained again take up to "
            f"{min_steps}; raise it, or lower again.best"
        ).with_facts(file=str(path), key="max_steps", found=str(sweep.max_steps), expected=f"at least {min_steps}")
    for key, values in sweep.space.items():
        for value in values.ends:
            try:
                sweep.make_run({key: value})
            except ConfigError as exc:
                raise ConfigError(f"{path}: space.{key}: {exc}").with_facts(file=str(path), key=f"space.{key}") from exc
    return sweep


def _check_choice(path: Path, key: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ConfigError(
            f'{path}: {key} = "{name}" is no validation set of the run; expected one of '
            f"{', '.join(names) or 'none: add held-out text'}"
        ).with_facts(file=str(path), key=key, found=name)


def as_numbers(values: Mapping[str, Any]) -> dict[str, Value]:
    """Return values of a sampler or a journal as a run file holds them."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
