"""The trainer of a site that owns a verified pipeline: a round begins with new weights, and ends verified."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from phalanx.errors import ConfigError, NoHolderError, PeerLostError, PhalanxError
from phalanx.federated.algorithms import LocalRule, Named
from phalanx.federated.local import LocalUpdate, SiteScores
from phalanx.federated.site_trainer import SiteData, SiteSchedule
from phalanx.federated.vectors import shapes_of
from phalanx.objectives import OBJECTIVES, objective_of
from phalanx.pipeline import PipelineEngine
from phalanx.train.batches.validation import summed_losses
from phalanx.train.loop import step_inputs
from phalanx.train.setup.stage_source import RoundLibrary, RoundModules


class SiteStages(Protocol):
    """The pipeline of a site, as its trainer needs it."""

    def begin_phase(self, number: int, library: RoundLibrary, lost: PhalanxError | None) -> PipelineEngine:
        """Give every party that is left its stages, as they are when a round begins.

        Args:
            number: Number of the round, from 1.
            lost: Why the same round begins once more; None where it begins for the first time.
        """


class StagedTrainer:
    """A `LocalTrainer` of a site that owns a pipeline.

    Args:
        modules: All stages, in this process: rounds begin from them, and held-out rows are measured with them.
        rate: Learning rate of a round by its number, as every party computes it.

    Guarantees:
        The steps of a round have numbers that no other round has, so nothing that was signed in one counts in another.
        An update is given once its last step is verified and holders and shadows have agreed on the weights. It has the
        bits of an honest round, whichever party lied or was lost in it, as far as `PipelineEngine.step` promises.
    """

    def __init__(
        self,
        modules: RoundModules,
        stages: SiteStages,
        data: SiteData,
        schedule: SiteSchedule,
        rate: Callable[[int], float],
    ) -> None:
        self._modules, self._stages, self._data = modules, stages, data
        self._schedule, self._rate = schedule, rate
        self._objective = objective_of(modules.plan.objective)

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As `LocalTrainer` says."""
        return shapes_of(self._modules.trained_parameters)

    def train_round(self, number: int, start: Mapping[str, Tensor], rate: float, rule: LocalRule) -> LocalUpdate:
        """As `LocalTrainer` says; the rule is one that corrects nothing, as the run file has been looked at for."""
        del rule
        if rate != self._rate(number):
            raise ConfigError(
                f"round {number}: the owner requested the learning rate {rate}, but the run file has "
                f"{self._rate(number)}"
            )
        plan, lost = self._modules.plan, list[PhalanxError]()
        # what breaks a round off without a guard: that any one worker is gone
        breaks = (NoHolderError,) if plan.guard.is_enabled else (NoHolderError, PeerLostError)
        while True:
            library = self._modules.begin_round(start, (number - 1) * self._schedule.steps)
            engine = self._stages.begin_phase(number, library, lost[-1] if lost else None)
            try:
                return self._run_steps(engine, number, start)
            except breaks as exc:
                lost.append(exc)
                # each time one party is left less, and the owner alone has every stage
                if len(lost) > len(plan.stages):
                    raise

    def _run_steps(self, engine: PipelineEngine, number: int, start: Mapping[str, Tensor]) -> LocalUpdate:
        schedule, total, targets = self._schedule, 0.0, 0
        batches = self._data.round_batches(number, schedule.steps, schedule.batch_size)
        for step, batch in enumerate(batches, (number - 1) * schedule.steps):
            result = engine.train_turn(step, step_inputs(batch, schedule.microbatches, self._objective))
            total, targets = total + result.loss * result.num_targets, targets + result.num_targets
        weights: Named = {}
        for copy in engine.fetch_stages("weights"):
            weights |= {name: weight.detach().clone() for name, weight in copy.module.trainable_parameters().items()}
        delta = {name: weights[name] - weight for name, weight in start.items()}
        return LocalUpdate(delta, self._data.num_sequences, total / targets, targets, schedule.steps)

    def measure_weights(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """As `LocalTrainer` says; the site's own process computes it, between two rounds."""
        self._modules.load_weights(weights)
        # how far the next token is found, whatever rows are weighted by in training
        measured = self._objective if self._objective.target == "pair" else OBJECTIVES["causal_lm"]
        ((loss, targets),) = summed_losses(self._modules.all, [self._data.held_out()], measured)
        return SiteScores(loss, targets)
