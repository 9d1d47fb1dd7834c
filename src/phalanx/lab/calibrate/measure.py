"""Recompute real microbatches in every way and keep how far each lies from its reference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor

from phalanx.errors import NonFiniteLossError, TrainingError
from phalanx.lab.calibrate.operators import (
    LEVELS,
    OPERATORS,
    Operator,
    Recorded,
    operators_of,
    record_operators,
    replay_operators,
)
from phalanx.lab.calibrate.paths import NumericPath, PathPair
from phalanx.pipeline import DriftWatch, StageCopy, StageRunner, StepPlan, token_distances, token_residual
from phalanx.planner.schedules import Direction
from phalanx.train.setup.honest_run import HonestInputs

_TOKENS_KEPT = 256
"""Of one message, for the quantiles; maximum and mean are over all of its tokens."""

_QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}

Figures = dict[str, int | float | None]


@dataclass
class Differences:
    """Distances between two computations of the same messages."""

    maxima: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_equal: int = 0
    _total: float = 0.0
    _kept: list[Tensor] = field(default_factory=list)

    def add_message(self, claimed: Tensor, reference: Tensor, where: str) -> None:
        """Compare one message.

        Args:
            claimed: ``[batch, seq, dim]``.
        """
        claimed, reference = claimed.detach().cpu(), reference.detach().cpu()
        distances = token_distances(claimed, reference).flatten()
        largest = float(distances.max())
        if not largest < float("inf"):
            raise NonFiniteLossError(f"calibrate: {where}: an honest message holds NaN or infinity; lower optimizer.lr")
        self.maxima.append(largest)
        self.num_tokens += distances.numel()
        self.num_equal += claimed.dtype == reference.dtype and torch.equal(claimed, reference)
        self._total += float(distances.sum())
        self._kept.append(distances[:: max(1, distances.numel() // _TOKENS_KEPT)].float())

    def difference_figures(self) -> Figures:
        """Counts, and distances over tokens; None where nothing was compared."""
        figures: Figures = {"num_messages": len(self.maxima), "num_tokens": self.num_tokens}
        if not self.maxima:
            return figures | dict.fromkeys(("share_bit_equal", "mean", *_QUANTILES, "median_of_maxima", "max"))
        quantiles = torch.quantile(torch.cat(self._kept), torch.tensor(list(_QUANTILES.values())))
        figures |= {"share_bit_equal": self.num_equal / len(self.maxima), "mean": self._total / self.num_tokens}
        figures |= {name: float(value) for name, value in zip(_QUANTILES, quantiles, strict=True)}
        return figures | {"median_of_maxima": median(self.maxima), "max": max(self.maxima)}


@dataclass
class ResidualLean:
    """Projected residuals of one direction of messages: how large honest noise is there, and how one-sided.

    `scores` has one list for each stage and secret direction.
    """

    scores: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    num_alarms: int = 0

    def add_scores(self, stage: int, projected: list[float]) -> None:
        """Take the projections of one message's residual."""
        for n, score in enumerate(projected):
            self.scores.setdefault((stage, n), []).append(score)

    def lean_figures(self) -> Figures:
        """Median over charts of sigma, and the largest mean in units of its chart's sigma; None without noise."""
        sigmas, biases = [], []
        for scores in self.scores.values():
            centre = median(scores)
            sigma = 1.4826 * median(abs(score - centre) for score in scores)
            if sigma > 0.0:
                sigmas.append(sigma)
                biases.append(abs(fmean(scores)) / sigma)
        return {
            "projected_sigma": median(sigmas) if sigmas else None,
            "projected_bias_sigmas": max(biases) if biases else None,
            "drift_alarms": self.num_alarms,
        }


Messages = tuple[Tensor, Tensor]
"""Output and gradient of the input, in the order of `DIRECTIONS`."""

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

# no adversary is here to be surprised: fixed directions make two calibrations comparable
_PUBLIC_KEY = b"phalanx calibrate"


@dataclass
class PairFigures:
    """The figures of one pair of paths."""

    messages: dict[Direction, Differences] = field(
        default_factory=lambda: {direction: Differences() for direction in DIRECTIONS}
    )
    leaning: dict[Direction, ResidualLean] = field(
        default_factory=lambda: {direction: ResidualLean() for direction in DIRECTIONS}
    )
    operators: dict[Operator, Differences] = field(default_factory=lambda: {kind: Differences() for kind in OPERATORS})
    watch: DriftWatch = field(default_factory=lambda: DriftWatch(_PUBLIC_KEY))

    def add_case(self, case: HonestInputs, path: str, claimed: Messages, reference: Messages) -> None:
        """Compare both messages of a microbatch twice: by their distance, and by their residual's lean."""
        place = f"stage {case.stage}, step {case.step}, microbatch {case.microbatch}, {path}"
        for direction, x, y in zip(DIRECTIONS, claimed, reference, strict=True):
            self.messages[direction].add_message(x, y, place)
            residual = token_residual(x, y)
            leaning = self.leaning[direction]
            leaning.add_scores(case.stage, self.watch.project_residual(case.stage, direction, residual))
            leaning.num_alarms += self.watch.add_residual(case.stage, direction, residual) is not None


class PathComparison:
    """All pairs of paths, and the runners that compute them.

    Attributes:
        figures: Figures by pair; a pair is left out where this machine turned out not to have its path.
    """

    def __init__(self, plan: StepPlan, pairs: Iterable[PathPair], absent: dict[str, str]) -> None:
        self.figures = {pair: PairFigures() for pair in pairs}
        self.absent = dict(absent)
        self._plan = plan
        self._runners: dict[tuple[NumericPath, int], StageRunner] = {}

    def drop_weight_copies(self) -> None:
        """Forget copies of weights: the optimizer has stepped."""
        self._runners = {key: runner for key, runner in self._runners.items() if not key[0].has_own_weights}

    def compare_paths(self, cases: Sequence[HonestInputs], stage: StageCopy) -> None:
        """Compute microbatches of one stage in every way, one way after the other; the first one operator by operator.

        Raises:
            NonFiniteLossError: An honest message holds NaN or infinity.
        """
        for reference in dict.fromkeys(pair.reference for pair in self.figures):
            expected = self._compute_on_path(reference, stage, cases)
            if expected is None:
                continue
            for pair, figures in list(self.figures.items()):
                outputs = self._compute_on_path(pair.path, stage, cases) if pair.reference == reference else None
                if outputs is not None:
                    for case, claimed, reference_output in zip(cases, outputs, expected, strict=True):
                        figures.add_case(case, pair.path.name, claimed, reference_output)
        self._compare_operators(cases[0], stage)

    def _compare_operators(self, case: HonestInputs, stage: StageCopy) -> None:
        kinds = operators_of(stage.module)
        for reference in dict.fromkeys(pair.reference for pair in self.figures):
            with reference.switch_process(), record_operators(stage.module) as expected:
                self._runner_for(reference, stage).recompute_microbatch(case.step, case.microbatch, case.x, None)
            for pair, figures in self.figures.items():
                # hooks inside a compiled stage would cut it into pieces that are compiled one by one
                if pair.reference != reference or pair.path.compiled:
                    continue
                for name, out in self._replay_operators(pair.path, case, stage, expected).items():
                    place = f"stage {case.stage}, step {case.step}, {name}, {pair.path.name}"
                    figures.operators[kinds[name]].add_message(out, expected[name][1], place)

    def _replay_operators(
        self, path: NumericPath, case: HonestInputs, stage: StageCopy, expected: Recorded
    ) -> dict[str, Tensor]:
        """Output of each operator from the inputs that it had on the reference path."""
        runner = self._runner_for(path, stage)
        outputs: dict[str, Tensor] = {}
        for level in LEVELS:
            with path.switch_process(), replay_operators(runner.module, expected, level) as replayed:
                runner.recompute_microbatch(case.step, case.microbatch, case.x, None)
            outputs |= {name: out for name, (_, out) in replayed.items()}
        return outputs

    def _compute_on_path(
        self, path: NumericPath, stage: StageCopy, cases: Sequence[HonestInputs]
    ) -> list[Messages] | None:
        """Compute in one way; None, for good, where this machine cannot."""
        is_new = all(not figures.messages["forward"].maxima for figures in self._pairs_with(path))
        try:
            with path.switch_process():
                runner = self._runner_for(path, stage)
                return [_recompute_messages(runner, case) for case in cases]
        # torch asserts where a kind of device is missing from its build
        except (RuntimeError, OSError, ImportError, AssertionError) as exc:
            if not is_new:
                raise TrainingError(f"calibrate: {path.name}: worked at first, then: {exc}") from exc
            # type and first line, without the paths that compilers put into theirs
            lines = str(exc).strip().splitlines()
            first = " ".join(word for word in (lines[0] if lines else "").split() if "/" not in word)
            self.absent[path.name] = f"{type(exc).__name__}: {first}"[:160].removesuffix(": ")
            self.figures = {pair: figures for pair, figures in self.figures.items() if path not in _both_paths(pair)}
            return None

    def _pairs_with(self, path: NumericPath) -> list[PairFigures]:
        return [figures for pair, figures in self.figures.items() if path in _both_paths(pair)]

    def _runner_for(self, path: NumericPath, stage: StageCopy) -> StageRunner:
        key = (path, stage.spec.index)
        if key not in self._runners:
            self._runners[key] = path.make_runner(self._plan, stage)
        return self._runners[key]


def _both_paths(pair: PathPair) -> tuple[NumericPath, NumericPath]:
    return pair.reference, pair.path


def _recompute_messages(runner: StageRunner, case: HonestInputs) -> Messages:
    y, x_gradient = runner.recompute_microbatch(case.step, case.microbatch, case.x, case.gradient)
    if x_gradient is None:
        x_gradient = torch.zeros_like(case.x)
    return y, x_gradient
