"""The ranks of ``[parallel]`` as the engine of one site: ``python -m phalanx.train.parties.site_ranks RUN MODELS``.

The site's process is rank 0 and starts the others, which stay, with their share of the model, from round to round.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.child import PARENT, die_with_parent
from phalanx.config import escape_controls
from phalanx.data import IGNORE, Batch
from phalanx.errors import ConfigError, PhalanxError
from phalanx.federated.algorithms import LocalRule, Named
from phalanx.federated.local import LocalUpdate, SiteScores, SpentRows
from phalanx.federated.private_rows import SiteRows
from phalanx.federated.site_trainer import SiteData, SiteSchedule
from phalanx.federated.vectors import shapes_of
from phalanx.models import ModelSource, open_model
from phalanx.objectives import OBJECTIVES, Objective, objective_of
from phalanx.optimizers import learning_rate, moment_shapes
from phalanx.parallel import Controller, LocalRanks, RankRecipe, check_layout, find_place, follow_rank0
from phalanx.parallel.control.rank_trainer import check_objective
from phalanx.parallel.groups.mesh import open_domain
from phalanx.pipeline import keep_freed_memory
from phalanx.planner.model.optimizers import is_in_bytes
from phalanx.train.batches.validation import summed_losses
from phalanx.train.config import FederatedRankRun, load_run
from phalanx.train.engines.domain_deepspeed import open_member
from phalanx.train.engines.domain_engine import gathered_stages
from phalanx.train.sessions import domain
from phalanx.train.setup.preflight import load_own_code
from phalanx.train.setup.process import deterministic_kernels

COMMAND = "phalanx.train.parties.site_ranks"
_CPU = torch.device("cpu")
_WEIGHT = "weight/"


class RankedTrainer:
    """A `LocalTrainer` of all ranks of a site together.

    Args:
        rate: Learning rate of a round by its number, as every rank computes it.

    Guarantees:
        A round begins with the weights that it is given and an optimizer that is new, so the same arguments give the
        same update; that of one process differs in the order in which numbers are added up.
    """

    def __init__(
        self,
        lead: Controller,
        data: SiteData,
        schedule: SiteSchedule,
        rate: Callable[[int], float],
        learning: "RankedLearning",
    ) -> None:
        self._lead, self._data, self._schedule, self._rate = lead, data, schedule, rate
        self._dp, self._objective = learning.dp, learning.objective
        self._pairs, self._rows, self._kind = learning.pairs, learning.rows, schedule.optimizer.kind
        self._shapes = shapes_of(self._collect_weights())

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As `LocalTrainer` says."""
        return self._shapes

    def train_round(self, number: int, start: Mapping[str, Tensor], rate: float, rule: LocalRule) -> LocalUpdate:
        """As `LocalTrainer` says; the rule is one that corrects nothing, as the run file has been looked at for."""
        del rule
        if rate != self._rate(number):
            raise ConfigError(
                f"round {number}: the owner requested the learning rate {rate}, but the run file has "
                f"{self._rate(number)}"
            )
        self._load_weights(start)
        schedule, total, targets = self._schedule, 0.0, 0
        if self._rows is not None:
            return self._train_private_round(self._rows, number, start)
        batches = self._data.round_batches(number, schedule.steps, schedule.batch_size)
        for step, batch in enumerate(batches, (number - 1) * schedule.steps):
            result = self._lead.run_step(step, batch.input_ids, batch.labels, batch.extras)
            count = self._objective.count_targets(batch.labels)
            total, targets = total + result.loss * count, targets + count
        delta = self._moved_since(start)
        return LocalUpdate(delta, self._data.num_sequences, total / targets, targets, schedule.steps)

    def _train_private_round(self, rows: SiteRows, number: int, start: Mapping[str, Tensor]) -> LocalUpdate:
        schedule, parts = self._schedule, self._schedule.microbatches * self._dp
        drawn = rows.draw_batches(number, schedule.steps, schedule.batch_size)
        for step, batch in enumerate(drawn, (number - 1) * schedule.steps):
            filled = self._fill_batch(batch, parts)
            self._lead.run_step(step, filled.input_ids, filled.labels, filled.extras)
        spent = SpentRows(rows.ledger.epsilon_bound, rows.ledger.num_left // schedule.steps)
        return LocalUpdate(self._moved_since(start), self._data.num_sequences, None, 0, schedule.steps, spent)

    def _fill_batch(self, batch: Batch | None, multiple: int) -> Batch:
        """Return a batch with rows that have no target behind its own, so that all copies have as many."""
        num_drawn = 0 if batch is None else len(batch.indices)
        missing = -num_drawn % multiple if num_drawn else multiple
        parts = [part for part in (batch, self._data.pick([0] * missing) if missing else None) if part is not None]
        filled = Batch(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.labels for part in parts]),
            tuple(index for part in parts for index in part.indices),
            {name: torch.cat([part.extras[name] for part in parts]) for name in parts[0].extras},
        )
        labels = filled.labels.clone()
        labels[num_drawn:] = IGNORE
        return replace(filled, labels=labels)

    def _moved_since(self, start: Mapping[str, Tensor]) -> Named:
        return {name: weight - start[name] for name, weight in self._collect_weights().items()}

    def measure_weights(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """As `LocalTrainer` says; pairs are measured by this process alone, which no layout of ranks changes."""
        if self._pairs is not None:
            return self._pairs.measure_weights(weights, self._data.held_out())
        self._load_weights(weights)
        return SiteScores(*self._lead.sum_losses(self._data.held_out(), self._dp))

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        def read(key: str) -> Tensor:
            kind, _, name = key.partition("/")
            if f"{kind}/" == _WEIGHT:
                return weights[name]
            # an optimizer that is new has zeros
            shape = moment_shapes(self._kind, weights[name].shape)[kind]
            return torch.zeros(shape, dtype=torch.uint8 if is_in_bytes(kind) else torch.float32)

        self._lead.load_stages(0, read)

    def _collect_weights(self) -> Named:
        state: Named = {}
        for stage in range(self._lead.num_stages):
            tensors = self._lead.collect_from_ranks(stage)
            state |= {
                name.removeprefix(_WEIGHT): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith(_WEIGHT)
            }
        return dict(sorted(state.items()))


@dataclass(frozen=True)
class RankedLearning:
    """The objective of ranks, and the rows that it reads.

    Attributes:
        dp: Divisor of the rows of a batch.
        pairs: Measure of held-out pairs; None where no pairs are learned.
        rows: The site's private rows, of which each step is charged before it is drawn; None where rows are not
            private.
    """

    dp: int
    objective: Objective = OBJECTIVES["causal_lm"]
    pairs: "PairsInTurn | None" = None
    rows: SiteRows | None = None


class PairsInTurn:
    """A measure of held-out pairs by one process, which builds one layer after the other.

    Args:
        recipe: The recipe of the ranks, whose weights are measured.
    """

    def __init__(self, source: ModelSource, recipe: RankRecipe) -> None:
        self._source, self._recipe, self._objective = source, recipe, objective_of(recipe.objective)

    def measure_weights(self, weights: Mapping[str, Tensor], batches: Iterable[Batch]) -> SiteScores:
        """Measure weights, by name."""
        stages = gathered_stages(self._source, self._recipe, weights)
        ((loss, pairs),) = summed_losses(stages, [batches], self._objective)
        return SiteScores(loss, pairs)


@contextlib.contextmanager
def ranked_trainer(
    run: FederatedRankRun,
    source: ModelSource,
    data: SiteData,
    schedule: SiteSchedule,
    kept: tuple[str, Path, Path],
    rows: SiteRows | None = None,
) -> Iterator[RankedTrainer]:
    """Start the other ranks of a site, and lead them until the context ends.

    Args:
        rows: The site's private rows; this process alone draws and charges them, and says how much noise there is.
    """
    parallel, (run_file, models, directory) = run.parallel, kept
    check_layout(parallel, source.hub_config_dict, domain.step_workload(run))
    recipe = domain.recipe_of(run, parallel, source)
    check_objective(recipe)
    with contextlib.ExitStack() as stack:
        command = (COMMAND, run_file, str(models))
        ranks = LocalRanks(directory, command, parallel.num_ranks, run.train.threads, parallel.silence_s)
        stack.enter_context(ranks)
        ranks.start_ranks()
        place = ranks.place_of(0)
        stack.enter_context(domain.join_domain(run, place, _CPU, ranks))
        noise = math.nan if rows is None else rows.ledger.step.noise_multiplier
        member = stack.enter_context(open_member(run, recipe, source, open_domain(parallel, _CPU), place, noise))
        lead = Controller(member, ranks)
        total = run.train.steps
        yield RankedTrainer(
            lead,
            data,
            schedule,
            lambda number: learning_rate(run.optimizer, number - 1, total),
            RankedLearning(
                parallel.dp,
                objective_of(recipe.objective),
                PairsInTurn(source, recipe) if run.train.learns_pairs else None,
                rows,
            ),
        )
        lead.end_run()


def play_site_rank(run: FederatedRankRun, models: Path) -> None:
    """Be a rank other than 0 of a site until its site ends."""
    load_own_code(run)
    parallel, place = run.parallel, find_place(os.environ)
    if place is None:
        raise ConfigError("parallel: this process has no rank of a site; start the site's own process")
    with deterministic_kernels(run.train.threads):
        source = open_model(run.model, models, run.train.seed)
        keep_freed_memory()
        with domain.join_domain(run, place, _CPU):
            recipe = domain.recipe_of(run, parallel, source)
            with open_member(run, recipe, source, open_domain(parallel, _CPU), place) as member:
                follow_rank0(member)


def main(run_file: str, models: str) -> int:
    """Be a rank and return an exit code."""
    if PARENT in os.environ:
        die_with_parent()
    try:
        run = load_run(run_file)
        if not isinstance(run, FederatedRankRun):
            raise ConfigError(f"{run_file}: needs [federated] and [parallel]; a site's own process starts its ranks")
        play_site_rank(run, Path(models))
    except PhalanxError as exc:
        sys.stderr.write(f"rank: {escape_controls(str(exc))}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
