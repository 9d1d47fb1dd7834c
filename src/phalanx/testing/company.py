"""A whole verified run in one process: the real owner, the real workers, no sockets and no child processes."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.checkpoint import Retention, Shard, latest_checkpoint, open_checkpoint, save_checkpoint
from phalanx.config import digest_config
from phalanx.engine import StepResult, Verdict
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.models import ModelSource, open_model, weights_digest
from phalanx.pipeline import (
    OWNER,
    AuditDraw,
    ExpectedWorkers,
    Files,
    LogHeadExchange,
    PipelineEngine,
    StepRecord,
    TimeLimits,
    Worker,
    WorkerConfig,
    admit_workers,
    fresh_nonce,
)
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity, Revocation, RevokedParties, certified_name, load_identity
from phalanx.testing.actor import Actor, WorkerCrash
from phalanx.testing.clock import CompanyClock, OwnersEndpoint, PartyThread
from phalanx.testing.endpoint import MemoryNetwork, RewritingEndpoint
from phalanx.testing.tiny import random_batch
from phalanx.train import CheckRecord, StagedRun, step_inputs
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary
from phalanx.transport import Endpoint

_JOIN_TIMEOUT_S = 60.0
_SECONDS_TO_END = 5.0

HONEST = Actor()


@dataclass(frozen=True)
class CompanySession:
    """One session of a simulated run.

    Attributes:
        log: An audit log with a head that workers are told and remember beside their keys; left out, there is none.
    """

    name: str = "simulation-1"
    log: AuditLog | None = None


class MemoryCompany:
    """SIMULATOR, not for training: owner and workers as threads of one process over a `MemoryNetwork`.

    Everything else is the real thing: engine, workers, messages, signatures, certificates, referee.
    A worker can be given an `Actor` that lies in its computations or in its messages, or dies.

    Patience and deadlines are measured with a clock of the simulation's own, which passes, by leaps, only while every
    party waits: a machine that is slow or busy makes no party silent, and to wait for a silent one takes no time.
    A liar that blocks on purpose does so with a `Stall`; the clock waits for any other blocking as for work.

    Threads share torch's random generator, so dropout must be 0. Numeric classes are measured as in a real run; an
    actor computes unlike the others with `Actor.kernels`. Seconds of CPU per party mean little here.

    Args:
        run: Run file; its data section is not read, batches are drawn at random.
        directory: Gets identities, evidence and the model; must hold no run yet.
        actors: By worker name, ``worker-1`` for stage 1 and so on, ``worker-1.2`` for a worker that has come back;
            workers without an entry are honest.
        cache: Directory of drawn models; under `directory` when left out.
        draw: Decides the audits; under a fresh key and a fresh nonce when left out.
        session: Its name, and its audit log; two companies with one `pipeline.pki` have two.

    Raises:
        ConfigError: An actor belongs to no worker of the run.

    Attributes:
        events: Audit log entries in order: kind and body.
        checks: Recomputed parts of the applied steps, and steps in doubt.
        records: Step records, one of each applied step with all its audits.
        errors: The error of each worker that ended with one of ours, by name.
    """

    engine: PipelineEngine
    _endpoint_class = RewritingEndpoint

    def __init__(
        self,
        run: StagedRun,
        directory: Path,
        actors: Mapping[str, Actor] | None = None,
        *,
        cache: Path | None = None,
        draw: AuditDraw | None = None,
        session: CompanySession = CompanySession(),
    ) -> None:
        choices = (*run.pipeline.worker_names, *run.pipeline.late_workers)
        strangers = sorted(name for name in actors or {} if certified_name(name) not in choices)
        if strangers:
            raise ConfigError(f"actors: {', '.join(strangers)}: no workers of this run; choices: {', '.join(choices)}")
        self.run_config = run
        self.session, self._log = session.name, session.log
        self.events: list[tuple[str, dict[str, object]]] = []
        self.checks = CheckRecord(run.guard)
        self.records: list[StepRecord] = []
        self.errors: dict[str, PhalanxError] = {}
        self.source: ModelSource = open_model(run.model, cache or directory / "models", run.train.seed)
        self.plan = make_plan(run, self.source)
        self._vocab_size = self.source.vocab_size
        self._home = RunDirectory(directory / "run", run, resume=False, parties=run.stage_workers)
        self.draw = draw or AuditDraw.from_guard(self._home.audit_key(), fresh_nonce(), run.guard)
        self._actors = dict(actors or {})
        self._network = MemoryNetwork()
        self._endpoints: dict[str, RewritingEndpoint] = {}
        self.clock = CompanyClock()
        self._workers: dict[str, Worker] = {}
        self._next_step = 0
        self._is_under_way = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start all parties and give out the roles.

        Raises:
            PeerLostError: A worker died before the first step.
        """
        with contextlib.ExitStack() as stack:
            self._start_company(stack)
            self._is_under_way = True
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, num_steps: int) -> list[StepResult]:
        """Train so many steps more."""
        results = []
        for _ in range(num_steps):
            batch = random_batch(self.run_config, self._vocab_size, self._next_step)
            inputs = step_inputs(batch, self.run_config.train.microbatches)
            results.append(self.engine.train_turn(self._next_step, inputs))
            self._next_step += 1
        return results

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name, after the states of the last step have been agreed on."""
        parameters = (
            (name, tensor.detach())
            for copy in self.engine.fetch_stages("weights")
            for name, tensor in copy.module.all_parameters().items()
        )
        return weights_digest(parameters)

    def save_step(self) -> None:
        """Write a checkpoint, as a run does every `checkpoint.every` steps."""
        shards = (
            Shard(copy.spec.index, copy.optimizer.state_tensors(), copy.step_count)
            for copy in self.engine.fetch_stages("state")
        )
        state = {"run": self._home.run_id, "config_digest": digest_config(self.run_config), "step": self._next_step}
        save_checkpoint(
            self._home.checkpoint_directory,
            self._next_step,
            shards,
            state,
            sign=self._home.owner,
            retention=Retention(2),
        )

    def fall_back(self) -> int:
        """Go on after a `NoHolderError`: the parties that are left begin again from the last checkpoint."""
        path = latest_checkpoint(self._home.checkpoint_directory)
        if path is None:
            raise CheckpointError(f"{self._home.checkpoint_directory}: holds no checkpoint; call save() before")
        owner = self._home.owner.public
        checkpoint = open_checkpoint(path, owner, run=self._home.run_id, config_digest=digest_config(self.run_config))
        library = StageLibrary(self.source, self.plan, checkpoint)
        self.engine.fall_back(library, checkpoint.step, library.stage_digests())
        self._next_step = checkpoint.step
        return checkpoint.step

    def come_back(self, name: str) -> str | None:
        """Start a worker again, as a user starts its process again.

        Returns:
            What it is called from now on; None while its earlier incarnation still takes part, which ends that.
        """
        called = self.engine.incarnations.name_incarnation(name, True)
        if called is not None:
            self.start_worker(called)
        return called

    def start_worker(self, name: str) -> None:
        """Start a worker; one of the run's `late_workers` is let in between two steps."""
        self._endpoints[name] = self._make_endpoint(name)
        self.clock.threads[name] = PartyThread(name, self._endpoints[name], self._run_worker)
        self.clock.threads[name].start()

    def ask_to_leave(self, name: str) -> None:
        """Let a worker ask to be let go, as SIGTERM does."""
        self._workers[name].request_leave()

    def revoke_party(self, name: str, reason: str = "") -> Revocation:
        """Take a party's certificate back, as `phalanx peers --revoke` does."""
        return RevokedParties(self._home.pki_directory).revoke_party(name, reason)

    def kill_worker(self, name: str) -> None:
        """Let a worker die as soon as it next sends or waits."""
        self._endpoints[name].kill_party()

    def party_identity(self, name: str) -> Identity:
        """Return the private keys of a party, for tests in which a party forges or equivocates."""
        return load_identity(self._home.pki_directory / certified_name(name)).with_session_name(name)

    def is_worker_alive(self, name: str) -> bool:
        """Whether a worker's thread still runs."""
        return self.clock.threads[name].is_alive()

    @property
    def run_dir(self) -> Path:
        """Where evidence is written."""
        return self._home.path

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts so far."""
        return self.engine.all_verdicts

    @property
    def evicted(self) -> list[str]:
        """Names of the parties that were convicted."""
        return self._parties_in_events("evicted")

    @property
    def lost(self) -> list[str]:
        """Names of the parties that died and were not convicted."""
        return self._parties_in_events("lost")

    def event_bodies(self, kind: str) -> list[dict[str, object]]:
        """What events of one kind say."""
        return [body for name, body in self.events if name == kind]

    def _parties_in_events(self, kind: str) -> list[str]:
        return [str(body["party"]) for body in self.event_bodies(kind)]

    def _start_company(self, stack: contextlib.ExitStack) -> None:
        run, home = self.run_config, self._home
        names = run.pipeline.worker_names
        endpoint = stack.enter_context(self._owners_endpoint())
        stack.callback(self._end_workers)
        # parties must know each other before the first of them sends
        for name in names:
            endpoint.add_peer(load_identity(home.pki_directory / name).public)
        for name in names:
            self.start_worker(name)
        guests = ExpectedWorkers(
            {name: home.read_certificate(name) for name in names},
            {name: home.read_certificate(name) for name in run.pipeline.late_workers},
            is_alive=self.is_worker_alive,
            last_output=lambda name: str(self.errors.get(name, "it crashed")),
            timeout_s=_JOIN_TIMEOUT_S,
            witnesses=LogHeadExchange(None if self._log is None else self._log.public_entries, home.owner.public),
        )
        try:
            members = admit_workers(endpoint, self.plan, guests, home.owner.authority_pem, self._note_event)
        except ConfigError:
            # every worker was told why, and ends by itself
            for thread in self.clock.threads.values():
                thread.join(_SECONDS_TO_END)
            raise
        members.is_alive, members.dismiss, members.returns = (
            self.is_worker_alive,
            self.kill_worker,
            run.pipeline.returns,
        )
        members.revoked = RevokedParties(home.pki_directory).read_revocations
        members.certificates = {**members.certificates, OWNER: home.read_certificate(OWNER)}
        library = StageLibrary(self.source, self.plan, None, run.model.adapter_directory)
        files = Files(home.path, library, self._note_event, note_checks=self.checks.note_applied)
        files.note_step = self._note_step
        limits = TimeLimits(run.pipeline.step_timeout_s, run.pipeline.patience_s, self.clock)
        self.engine = PipelineEngine(self.plan, endpoint, members, files, self.draw, limits)
        stack.callback(self.engine.close, "the simulation is over")
        self.engine.start_parties(0, library.stage_digests() if run.guard.is_enabled else {})

    def _owners_endpoint(self) -> Endpoint:
        wire, limits = self._network.wire_for(OWNER), self.run_config.pipeline.transport
        return OwnersEndpoint(self._home.owner, {}, self.session, wire, limits, clock=self.clock)

    def _note_event(self, kind: str, body: dict[str, object]) -> None:
        self.events.append((kind, body))
        if self._log is not None:
            self._log.append_event(kind, body)
        self.checks.observe(kind, body)

    def _note_step(self, record: StepRecord) -> None:
        self.records.append(record)
        if self._log is not None:
            self._log.append_step({"step": record.step, "epoch": record.epoch}, record.leaves)

    def worker_endpoint(self, name: str) -> RewritingEndpoint:
        """Return a worker's endpoint, for messages that it sends unasked."""
        return self._endpoints[name]

    def _make_endpoint(self, name: str) -> RewritingEndpoint:
        limits = self.run_config.pipeline.transport
        endpoint = self._endpoint_class(
            self.party_identity(name),
            {},
            self.session,
            self._network.wire_for(certified_name(name)),
            limits,
            actor=self._actors.get(name, HONEST),
        )
        endpoint.add_peer(self._home.owner.public)
        return endpoint

    def _run_worker(self, name: str) -> None:
        endpoint = self._endpoints[name]
        identity = self.party_identity(name)
        keys = self._home.pki_directory / certified_name(name)
        # the parties of a company meet in memory, and nothing connects to it
        owner = f"{OWNER}:1"
        config = WorkerConfig(identity=str(keys), owner=owner, transport=self.run_config.pipeline.transport)
        actor = self._actors.get(name, HONEST)
        try:
            self._workers[name] = Worker(config, identity, endpoint, actor.wrap_copy, actor.kernels)
            self._workers[name].serve_owner(name)
        except WorkerCrash:
            pass
        except PhalanxError as exc:
            self.errors[name] = exc
        finally:
            endpoint.close()

    def _end_workers(self) -> None:
        if not self._is_under_way:
            # they have not been told that it is over
            for name in self.clock.threads:
                self.kill_worker(name)
        for name, thread in self.clock.threads.items():
            thread.join(_SECONDS_TO_END)
            if thread.is_alive():
                self.kill_worker(name)
                thread.join(_SECONDS_TO_END)
