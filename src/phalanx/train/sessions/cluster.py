"""The owner and its workers: started or awaited together, and ended together."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from phalanx.access_gate import check_caller
from phalanx.checkpoint.state_files import StateFiles
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import ModelSource
from phalanx.pipeline import (
    OWNER,
    AuditDraw,
    Callers,
    ExpectedWorkers,
    Files,
    Incarnations,
    LocalWorkers,
    LogHeadExchange,
    Members,
    NoteChecks,
    Observe,
    PipelineEngine,
    StepPlan,
    StepRecord,
    TimeLimits,
    WorkerCode,
    WorkerConfig,
    admit_workers,
    fetch_kept,
    fresh_nonce,
    keep_freed_memory,
    revocation_facts,
)
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import RevokedParties, certified_name
from phalanx.telemetry import MissingNotice
from phalanx.train.config import StagedRun
from phalanx.train.records.audit_trail import session_rules
from phalanx.train.records.history import RunHistory
from phalanx.train.records.journal import Journal
from phalanx.train.records.party_book import PartyTracker
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.remote_stacks import RemoteStacks
from phalanx.train.setup.stage_source import StageLibrary
from phalanx.train.setup.stage_table import estimate_stages
from phalanx.transport import Endpoint, GrpcWire


class Replacements:
    """Starts replacements of lost workers, as long as there are free names.

    Args:
        names: Free names, in the order of their use.
        start: Starts the worker of a name.
        is_alive: Whether the process of a name still runs.
        has_joined: Whether the worker of a name has ever joined the run.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        start: Callable[[str], None],
        is_alive: Callable[[str], bool],
        has_joined: Callable[[str], bool],
        observe: Observe,
    ) -> None:
        self._names = iter(names)
        self._start = start
        self._is_alive = is_alive
        self._has_joined = has_joined
        self._observe = observe
        self._expected: list[str] = []

    def start_replacement(self, gone: str) -> None:
        """Start another worker, as long as there are names."""
        name = next(self._names, None)
        if name is not None:
            self._start(name)
            self._expected.append(name)
            self._observe("respawned", {"party": name, "in_place_of": gone})

    def replace_stillborn(self) -> None:
        """Start another worker for each that has ended without joining: no other part of the owner misses it."""
        self._expected = [name for name in self._expected if not self._has_joined(name)]
        stillborn = [name for name in self._expected if not self._is_alive(name)]
        self._expected = [name for name in self._expected if name not in stillborn]
        for name in stillborn:
            self.start_replacement(name)


class WorkerProcesses(Protocol):
    """The processes of a run's workers, as far as their owner starts and ends them."""

    def start_workers(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Start one process per worker file."""
        ...

    def start_fork_server(self, threads: int) -> None:
        """Prepare for workers that are started later."""
        ...

    def is_worker_alive(self, name: str) -> bool:
        """Whether a worker may still run."""
        ...

    def dismiss_worker(self, name: str) -> None:
        """End one worker."""
        ...

    def worker_output(self, name: str) -> str:
        """The end of a worker's output, for an error message."""
        ...

    def close(self) -> None:
        """Give every worker a moment to end by itself, then end it."""
        ...


OpenWorkers = Callable[[Path], contextlib.AbstractContextManager[WorkerProcesses]]
"""What starts local workers, given the directory of their files and logs."""

# people start remote workers by hand; a local one that dies is noticed at once, and a busy machine takes its time
_JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class JoinedWorkers:
    """Workers that have joined and are set up, without roles.

    Attributes:
        workers: Processes of this machine, where the workers are local.
        wire: The owner's, which tells each joining worker its name in this session.
    """

    members: Members
    workers: WorkerProcesses
    wire: GrpcWire
    endpoint: Endpoint

    def fetch_kept(self, party: str, stage: int, step: int, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Get the state that a worker's process has kept on its own disk; see `phalanx.pipeline.fetch_kept`."""
        # a worker that had come back in the last session is called by its certificate again
        name = certified_name(party)
        if name not in self.members.addresses:
            raise CheckpointError(f"stage {stage}: {name}, which has its state, did not come back")
        return fetch_kept(self.endpoint, name, stage, step, expected)


@contextlib.contextmanager
def join_workers(
    run: StagedRun,
    home: RunDirectory,
    plan: StepPlan,
    observe: Observe,
    *,
    session: str,
    names: Sequence[str],
    late: Sequence[str],
    open_workers: OpenWorkers = LocalWorkers,
    log: AuditLog | None = None,
    say: Callable[[str], None] = lambda line: None,
    book: PartyTracker | None = None,
) -> Iterator[JoinedWorkers]:
    """Start or await the workers called `names`, and end them whatever happens; `late` ones may come at any time.

    Frames and evidence count in `session` alone, which `session_name` makes anew for each start.

    A worker without a name in `names`, such as one convicted in an earlier session, is not started and not let in.
    `open_workers` starts the local ones; another than the default is for drills only. `say` takes a line about each
    calling party of another machine, from other threads; `book` follows all parties. Workers of other machines remember
    the length of `log`; those of this one live and die with the owner.

    Raises:
        ConfigError: A worker computes other bits than the run allows.
    """
    keep_freed_memory()
    wire = GrpcWire(home.owner, run.pipeline.transport)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        endpoint = stack.enter_context(Endpoint(home.owner, {}, session, wire, run.pipeline.transport))
        # a second process of a certificate waits, before the engine is there as later on, until the first is given up
        incarnations = Incarnations(endpoint, (), run.pipeline.returns)
        wire.name_of = incarnations.name_incarnation
        if book is not None:
            book.watch_links(endpoint, incarnations)
        revocations = RevokedParties(home.pki_directory)
        if run.pipeline.remote_workers:
            wire.admit = check_caller
            wire.name_of = Callers(
                incarnations.name_incarnation, (*names, *late), say, revocations.read_revocations
            ).name_caller
        workers = stack.enter_context(open_workers(home.path / "workers"))
        if run.pipeline.remote_workers:
            home.announce_address(wire.address)
            observe("awaiting", {"address": wire.address, "parties": list(names)})
        else:
            if len(names) + len(late) > 1:
                workers.start_fork_server(run.train.threads)
            workers.start_workers({name: worker_config(run, home, name, wire.address) for name in names})
        witnesses = LogHeadExchange()
        if run.pipeline.remote_workers and log is not None:
            witnesses = LogHeadExchange(log.public_entries, home.owner.public)
        guests = ExpectedWorkers(
            {name: home.read_certificate(name) for name in names},
            {name: home.read_certificate(name) for name in late},
            is_alive=workers.is_worker_alive,
            last_output=workers.worker_output,
            timeout_s=_JOIN_TIMEOUT_S,
            # a process of this machine that does not come is our own failure
            may_be_absent=bool(run.pipeline.remote_workers),
            incarnations=incarnations,
            witnesses=witnesses,
            report_missing=MissingNotice(say, _JOIN_TIMEOUT_S, names).waits_for,
        )
        try:
            members = admit_workers(endpoint, plan, guests, home.owner.authority_pem, observe)
        except ConfigError:
            # every worker was told why, and shall have the time to say so
            workers.close()
            raise
        members.rebalance_every, members.returns = run.pipeline.rebalance_every, run.pipeline.returns
        members.is_alive, members.dismiss = workers.is_worker_alive, workers.dismiss_worker
        members.revoked = revocations.read_revocations
        members.certificates = {**members.certificates, OWNER: home.read_certificate(OWNER)}
        yield JoinedWorkers(members, workers, wire, endpoint)
        workers.close()


@contextlib.contextmanager
def make_engine(
    joined: JoinedWorkers,
    run: StagedRun,
    home: RunDirectory,
    plan: StepPlan,
    library: StageLibrary,
    observe: Observe,
    *,
    draw: AuditDraw,
    late: Sequence[str] = (),
    journal: Journal | None = None,
    note_checks: NoteChecks | None = None,
    note_step: Callable[[StepRecord], None] | None = None,
) -> Iterator[PipelineEngine]:
    """Make the engine that drives joined workers; no role is given yet. At the end every worker is told so."""
    members, workers = joined.members, joined.workers
    if not run.pipeline.remote_workers:
        replacements = Replacements(
            late,
            start=lambda name: workers.start_workers({name: worker_config(run, home, name, joined.wire.address)}),
            is_alive=workers.is_worker_alive,
            has_joined=lambda name: name in members.addresses,
            observe=observe,
        )
        members.replace, members.look_after = replacements.start_replacement, replacements.replace_stillborn
    for name in members.names:
        observe("party_joined", {"party": name, "address": members.addresses[name], "class": members.class_of(name)})
    files = Files(home.path, library, observe, note_checks=note_checks, note_step=note_step)
    with contextlib.ExitStack() as stack:
        if journal is not None:
            files.note_verified = journal.note_verified
            files.states = StateFiles(home.journal_directory, OWNER, journal.give_up)
            stack.callback(files.states.close)
        limits = TimeLimits(run.pipeline.step_timeout_s, run.pipeline.patience_s)
        engine = PipelineEngine(plan, joined.endpoint, members, files, draw, limits)
        if run.pipeline.remote_workers:
            stacks = RemoteStacks(home.owner, run.pipeline.transport, home.path, members.addresses)
            members.ask_stacks = stack.enter_context(stacks).ask_in_background
            stack.push(lambda kind, *_: stacks.ask_after_failure(kind, engine.present_workers))
        yield engine
        engine.close("the run is complete")


@contextlib.contextmanager
def open_company(
    run: StagedRun, home: RunDirectory, plan: StepPlan, library: StageLibrary, observe: Observe
) -> Iterator[PipelineEngine]:
    """Start the workers and the engine of a run that begins at step 0: `join_workers` and `make_engine`."""
    with (
        join_workers(
            run, home, plan, observe, session=session_name(home), names=run.pipeline.worker_names, late=()
        ) as joined,
        make_engine(joined, run, home, plan, library, observe, draw=new_audit_draw(home, run)) as engine,
    ):
        yield engine


def session_name(home: RunDirectory) -> str:
    """Name a session that now begins; nothing that was signed in an earlier one counts in it."""
    return f"{home.run_id}-{secrets.token_hex(16)}"


def new_audit_draw(home: RunDirectory, run: StagedRun) -> AuditDraw:
    """The audits of a session that now begins: under the run's key and a nonce that no earlier session has had."""
    return AuditDraw.from_guard(home.audit_key(), fresh_nonce(), run.guard)


@dataclass(frozen=True)
class Participants:
    """The workers of a session, and the workers that the owner has revoked since the last session.

    Attributes:
        names: Those that take part from the beginning.
        late: Those that may come later.
        revoked: Bodies of the event `revoked`, of each one that no earlier session has logged.
    """

    names: list[str]
    late: list[str]
    revoked: list[dict[str, Any]]


def list_participants(run: StagedRun, home: RunDirectory, history: RunHistory) -> Participants:
    """Return the workers of a session that now begins: neither convicted nor revoked."""
    settings, listed = run.pipeline, RevokedParties(home.pki_directory).read_revocations()
    out = history.convicted | history.revoked | listed.keys()
    names = (*settings.worker_names, *settings.late_workers)
    return Participants(
        [name for name in settings.worker_names if name not in out],
        [name for name in settings.late_workers if name not in out],
        [revocation_facts(listed[name]) for name in names if name in listed.keys() - history.revoked],
    )


def opening_facts(
    run: StagedRun, home: RunDirectory, source: ModelSource, names: Sequence[str], session: str, draw: AuditDraw
) -> dict[str, Any]:
    """Return the additional facts of a pipeline session's first event.

    Args:
        names: Workers that take part from the beginning.
    """
    stages = [
        {key: getattr(row, key) for key in ("index", "layers", "parameters", "holder", "shadow")}
        for row in estimate_stages(run, source, names)
    ]
    return {
        "session": session,
        "stages": stages,
        "audit_key_commitment": draw.key_commitment if run.guard.is_enabled else None,
        "audit_nonce": draw.nonce.hex() if run.guard.is_enabled else None,
        **session_rules(run, home, run.stage_workers),
    }


def worker_config(run: StagedRun, home: RunDirectory, name: str, owner: str) -> WorkerConfig:
    """The file of a local worker."""
    return WorkerConfig(
        identity=str((home.pki_directory / name).resolve()),
        owner=owner,
        threads=run.train.threads,
        device=run.train.device,
        parallel=run.pipeline.layout_of(name),
        journal=str(home.journal_directory.resolve()) if run.journals else False,
        code=() if run.model.family is None else (WorkerCode(kind=run.model.family),),
        code_home=None if run.model.family is None else str(run.home.resolve()),
        # the port of the run file is the owner's
        transport=run.pipeline.transport.model_copy(update={"port": 0}),
    )
