"""The process of a site: ``python -m phalanx.train.parties.site_process SITE.toml``. It loads its model once."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.child import PARENT, die_with_parent, write_stacks_on_request
from phalanx.config import escape_controls
from phalanx.errors import PhalanxError
from phalanx.federated.carriers.bridge_site import BridgedSite, serve_bridge
from phalanx.federated.carriers.loopback_site import OwnerCall, serve_owner
from phalanx.federated.local import LocalTrainer
from phalanx.federated.private_rows import PrivateSteps
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.site_trainer import SiteData, SiteSchedule, SiteTrainer
from phalanx.federated.vectors import num_values
from phalanx.interrupts import allow_interrupts
from phalanx.models import ModelSource, open_model
from phalanx.optimizers import learning_rate
from phalanx.pipeline import LocalWorkers, PipelineEngine, StepPlan, keep_freed_memory
from phalanx.security.aggregate import RoundFile
from phalanx.security.crypto import Identity, make_private_directory
from phalanx.train.batches.private import site_rows
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.config import FederatedPipelineRun, FederatedRankRun, FederatedRun, PipelineRun
from phalanx.train.engines.staged_rounds import StagedTrainer
from phalanx.train.parties.site_ranks import ranked_trainer
from phalanx.train.records.history import ROUND_BEGUN
from phalanx.train.records.run_directory import RunDirectory, holds_run
from phalanx.train.sessions.cluster import OpenWorkers
from phalanx.train.sessions.owned_pipeline import OwnedPipeline
from phalanx.train.sessions.site_file import SiteFile, read_site, session_prefix, terms_of
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.preflight import load_own_code, require_extras
from phalanx.train.setup.privacy_outlook import noise_outlooks
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.stage_source import RoundLibrary, RoundModules
from phalanx.train.setup.whole_model import load_whole_model

DIRECTORY = "pipeline"
"""Inside a site's own directory of a run: log, evidence and keys of its pipeline, as a run directory has them."""


class RoundsInStages:
    """The pipeline of a site, from round to round; a `SiteStages`."""

    def __init__(self, run: PipelineRun, source: ModelSource, owned: OwnedPipeline, local_steps: int) -> None:
        self._run, self._source, self._owned, self._local_steps = run, source, owned, local_steps
        self._engine: PipelineEngine | None = None

    def begin_phase(self, number: int, library: RoundLibrary, lost: PhalanxError | None) -> PipelineEngine:
        """As `SiteStages` says; the log has a line for it before any step of the round."""
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
    """Return the plan of a site's pipeline, as its workers have it."""
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


Say = Callable[[str], None]


def run_site(file: SiteFile, run: FederatedRun, identity: Identity, say: Say) -> None:
    """Be a site until the owner ends the run.

    Args:
        file: From `read_site`.
    """
    load_own_code(run)
    require_extras(run)
    keep_freed_memory()
    make_private_directory(file.site_directory)
    with deterministic_kernels(run.train.threads), allow_interrupts(), contextlib.ExitStack() as stack:
        terms = terms_of(run, identity, Path(file.certificates), file.keys)
        if file.socket is not None:
            for name, peer in terms.roster.items():
                say(f"message key of {name}: {peer.public_key.hex()}{_key_note(name, file, identity)}")
        session = session_prefix(run)
        site = stack.enter_context(_open_site(file, run, identity, terms, say))
        if file.socket is not None:
            serve_bridge(
                BridgedSite(identity, terms.owner, Path(file.socket), session, file.transport), site.answer_order, say
            )
        elif file.owner is not None:
            call = OwnerCall(identity, terms.owner, file.owner, session, file.transport, file.join_timeout_s)
            serve_owner(call, site.answer_order, say)


def _key_note(name: str, file: SiteFile, identity: Identity) -> str:
    if name == identity.name:
        return " (this site)"
    return (
        " (as in keys)" if name in file.keys else " (certified by the authority only; ask the site, and add it to keys)"
    )


@contextlib.contextmanager
def _open_site(file: SiteFile, run: FederatedRun, identity: Identity, terms: RunTerms, say: Say) -> Iterator[Site]:
    source = open_model(run.model, file.kept_directory / "models", run.train.seed)
    own = file.own_data(run.data)
    texts = SharedTexts(run, source, file.kept_directory / "data", lambda phase, count: None, own=own)
    data = texts.share_of(identity.name)
    schedule = SiteSchedule(
        run.optimizer, terms.config.local_steps, run.train.draws_per_step, run.train.microbatches, run.train.seed
    )
    kept = file.run_directory(terms.run)
    with contextlib.ExitStack() as stack:
        trainer: LocalTrainer
        if isinstance(run, FederatedPipelineRun):
            trainer = stack.enter_context(staged_trainer(run, source, data, schedule, kept))
        elif isinstance(run, FederatedRankRun):
            paths = (file.run, file.kept_directory / "models", file.site_directory / "ranks")
            rows = site_rows(run, data, identity, file.site_directory)
            trainer = stack.enter_context(ranked_trainer(run, source, data, schedule, paths, rows))
        else:
            model, rows = (
                load_whole_model(run, source, texts.num_classes),
                site_rows(run, data, identity, file.site_directory),
            )
            private = None if rows is None else PrivateSteps(model, rows, schedule)
            trainer = SiteTrainer(model, data, schedule, kept, private)
        length = num_values(dict(trainer.trained_shapes()))
        for outlook in noise_outlooks(run, length, data.num_sequences):
            for line in (*outlook.describe_budget(), *filter(None, [outlook.noise_warning()])):
                say(line)
        if kept == file.site_directory:
            # all of it is of one run, whose file may change at a resume
            terms = replace(terms, kept_as="run")
        yield Site(identity, terms, trainer, RoundFile(file.site_directory), file.site_directory, say)


def main(path: str) -> int:
    """Be the site of a file and return an exit code."""
    # a site that hangs leaves its place in its log
    write_stacks_on_request()
    if PARENT in os.environ:
        die_with_parent()
    try:
        run_site(*read_site(Path(path)), lambda line: print(escape_controls(line), flush=True))  # noqa: T201 - its log
    except PhalanxError as exc:
        sys.stderr.write(f"site: {escape_controls(str(exc))}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
