"""The ranks of ``[parallel]`` as the engine of one site: ``python -m phalanx.train.parties.site_ranks RUN MODELS``.

The site's process is rank 0 and starts the others, which stay, with their share of the model, from round to round.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.child import PARENT, die_with_parent
from phalanx.config import escape_controls
from phalanx.data import IGNORE
from phalanx.errors import ConfigError, PhalanxError
from phalanx.federated.algorithms import LocalRule, Named
from phalanx.federated.local import LocalUpdate, SiteScores
from phalanx.federated.site_trainer import SiteData, SiteSchedule
from phalanx.federated.vectors import shapes_of
from phalanx.models import ModelSource, open_model
from phalanx.optimizers import learning_rate
from phalanx.parallel import Controller, LocalRanks, check_layout, find_place, follow_rank0
from phalanx.parallel.control.rank_trainer import check_objective
from phalanx.parallel.groups.mesh import open_domain
from phalanx.pipeline import keep_freed_memory
from phalanx.train.config import FederatedRankRun, load_run
from phalanx.train.engines.domain_deepspeed import open_member
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
        dp: Divisor of the rows of a measurement.

    Guarantees:
        A round begins with the weights that it is given and an optimizer that is new, so the same arguments give the
        same update; that of one process differs in the order in which numbers are added up.
    """

    def __init__(
        self, lead: Controller, data: SiteData, schedule: SiteSchedule, rate: Callable[[int], float], dp: int
    ) -> None:
        self._lead, self._data, self._schedule, self._rate, self._dp = lead, data, schedule, rate, dp
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
        batches = self._data.round_batches(number, schedule.steps, schedule.batch_size)
        for step, batch in enumerate(batches, (number - 1) * schedule.steps):
            result = self._lead.run_step(step, batch.input_ids, batch.labels, batch.extras)
            count = int((batch.labels != IGNORE).sum())
            total, targets = total + result.loss * count, targets + count
        delta = {name: weight - start[name] for name, weight in self._collect_weights().items()}
        return LocalUpdate(delta, self._data.num_sequences, total / targets, targets, schedule.steps)

    def measure_weights(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """As `LocalTrainer` says."""
        self._load_weights(weights)
        total, count = 0.0, 0
        for batch in self._data.held_out():
            # rows that no target is taken from, so that every copy has as many
            missing = -len(batch.indices) % self._dp
            ids = functional.pad(batch.input_ids, (0, 0, 0, missing))
            labels = functional.pad(batch.labels, (0, 0, 0, missing), value=IGNORE)
            loss, targets = self._lead.evaluate_on_ranks(ids, labels)
            total, count = total + loss, count + targets
        return SiteScores(total, count)

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        def read(key: str) -> Tensor:
            kind, _, name = key.partition("/")
            return weights[name] if f"{kind}/" == _WEIGHT else torch.zeros_like(weights[name])

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


@contextlib.contextmanager
def ranked_trainer(
    run: FederatedRankRun, source: ModelSource, data: SiteData, schedule: SiteSchedule, kept: tuple[str, Path, Path]
) -> Iterator[RankedTrainer]:
    """Start the other ranks of a site, and lead them until the context ends."""
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
        member = stack.enter_context(open_member(run, recipe, source, open_domain(parallel, _CPU), place))
        lead = Controller(member, ranks)
        total = run.train.steps
        yield RankedTrainer(
            lead, data, schedule, lambda number: learning_rate(run.optimizer, number - 1, total), parallel.dp
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
