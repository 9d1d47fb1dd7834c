"""The verified pipeline of one site: its owner is the site's process, its workers are processes beside it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.federated.site_trainer import SiteData, SiteSchedule
from phalanx.models import ModelSource
from phalanx.optimizers import learning_rate
from phalanx.pipeline import LocalWorkers, PipelineEngine, StepPlan
from phalanx.train.config import FederatedPipelineRun, PipelineRun
from phalanx.train.engines.staged_rounds import StagedTrainer
from phalanx.train.records.history import ROUND_BEGUN
from phalanx.train.records.run_directory import RunDirectory, holds_run
from phalanx.train.sessions.cluster import OpenWorkers
from phalanx.train.sessions.owned_pipeline import OwnedPipeline
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import RoundLibrary, RoundModules

DIRECTORY = "pipeline"
"""Inside a site's own directory: log, evidence and keys of its pipeline, as a run directory has them."""


class RoundsInStages:
    """The pipeline of a site, from round to round; a `SiteStages`.

    Args:
        run: The run that the site's pipeline is.
        owned: Its workers, log and evidence.
    """

    def __init__(self, run: PipelineRun, source: ModelSource, owned: OwnedPipeline, local_steps: int) -> None:
        self._run, self._source, self._owned, self._local_steps = run, source, owned, local_steps
        self._engine: PipelineEngine | None = None

    def begin_phase(self, number: int, library: RoundLibrary, lost: PhalanxError | None) -> PipelineEngine:
        """As `SiteStages` says; the log has a line for it before any step of the round.

        Raises:
            PeerLostError: A worker did not get ready in time.
        """
        step, digests = (number - 1) * self._local_steps, library.stage_digests() if self._run.guard.is_enabled else {}
        engine = self._engine
        if engine is None:
            # the rounds say which steps there are
            facts = {"steps_a_round": self._local_steps}
            engine = self._engine = self._owned.engage_workers(self._source, library, 0, facts)
            self._owned.observe(ROUND_BEGUN, {"round": number, "step": step})
            engine.start_parties(step, digests)
            return engine
        if lost is None:
            self._owned.observe(ROUND_BEGUN, {"round": number, "step": step})
        else:
            applied = engine.next_step
            body = {"from_step": applied, "to_step": step, "steps_lost": applied - step, "reason": str(lost)}
            self._owned.observe("fell_back", body)
        engine.fall_back(library, step, digests)
        return engine


def plan_of(run: FederatedPipelineRun, source: ModelSource) -> StepPlan:
    """Return the plan of a site's pipeline, as its workers have it.

    Raises:
        ConfigError: Run file and model do not fit.
    """
    return make_plan(run.site_pipeline, source).model_copy(update={"steps_a_round": run.federated.local_steps})


@contextlib.contextmanager
def staged_trainer(
    run: FederatedPipelineRun,
    source: ModelSource,
    data: SiteData,
    schedule: SiteSchedule,
    own: Path,
    open_workers: OpenWorkers = LocalWorkers,
) -> Iterator[StagedTrainer]:
    """Start the workers of a site's pipeline, and be their owner until the context ends.

    Args:
        open_workers: Starts workers; another than the default is for drills only.

    Raises:
        ConfigError: Its directory holds the pipeline of another run.
        AuditLogError: The log there is broken.
        PeerLostError: A worker did not come.
    """
    plain, plan, steps = run.site_pipeline, plan_of(run, source), run.federated.local_steps
    path, total = own / DIRECTORY, run.train.steps
    with RunDirectory(path, plain, resume=holds_run(path)) as home:
        if home.changes is not None:
            home.keep_changes()
        modules = RoundModules(source, plan, run.model.adapter_directory)
        with OwnedPipeline(plain, home, plan, open_workers) as owned:
            yield StagedTrainer(
                modules,
                RoundsInStages(plain, source, owned, steps),
                data,
                schedule,
                lambda number: learning_rate(run.optimizer, number - 1, total),
            )
