"""Plays a schedule in a whole company and says what came of it."""

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from changes import Known
from insider import Insider
from schedule import Schedule
from turns import EndlessError, TurnCompany

from phalanx.errors import NoHolderError, PhalanxError
from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.testing import Actor, CompanySession, tiny_run
from phalanx.train import PipelineRun
from phalanx.transport import TransportConfig

NUM_STEPS = 3
PATIENCE_S, STEP_TIMEOUT_S = 1.0, 60.0
MAX_EVENT_BYTES = 64 * 1024
"""In the events of one step, whatever an insider does."""
MAX_QUEUED_BYTES = 2**20
"""`transport.max_queued_bytes`; what has no payload may take twice as much."""
MAX_WORKERS = 5


@dataclass(frozen=True)
class Company:
    """One kind of company.

    Attributes:
        guard: How it looks after itself.
        stages: Of which the owner has the first and the last.
        spares: Workers beyond one for each of the others.
        late: Workers that may come later.
        most_liars: How many insiders at once it must withstand.
        is_exact: Whether no lie at all may reach the weights at these rates.
    """

    guard: GuardConfig
    stages: int = 4
    spares: int = 0
    late: int = 0
    most_liars: int = 1
    is_exact: bool = True

    @property
    def num_workers(self) -> int:
        """Number of workers that are there from the start."""
        return self.stages - 2 + self.spares

    def run(self, pki: Path) -> PipelineRun:
        """Its run file, with models and batches as small as can be."""
        pipeline = PipelineConfig(
            stages=self.stages,
            spares=self.spares,
            respawns=self.late,
            pki=str(pki),
            patience_s=PATIENCE_S,
            step_timeout_s=STEP_TIMEOUT_S,
            transport=TransportConfig(max_queued_bytes=MAX_QUEUED_BYTES),
        )
        run = tiny_run(pipeline=pipeline, guard=self.guard)
        return run.model_copy(update={"train": run.train.model_copy(update={"batch_size": 4, "microbatches": 2})})


def _all(**changes) -> GuardConfig:
    return GuardConfig(**{"audit_rate": 1.0, "step_audit_rate": 1.0, "owner_audit_rate": 0.0} | changes)


COMPANIES = {
    "gradient": Company(_all()),
    "lockstep": Company(_all(shadow="lockstep")),
    "lag": Company(_all(commit_lag=1)),
    "kept states": Company(_all(keep_states=4)),
    "default rates": Company(GuardConfig(), is_exact=False),
    "spare": Company(_all(), spares=1),
    "three workers": Company(_all(), stages=5),
    "newcomer": Company(_all(), stages=3, late=1),
    "league": Company(_all(owner_audit_rate=1.0, keep_states=4), stages=5, most_liars=2),
}


@dataclass
class Outcome:
    """What came of a schedule."""

    ended: BaseException | None = None
    weights: str | None = None
    evicted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    crashes: dict[str, BaseException] = field(default_factory=dict)
    errors: dict[str, PhalanxError] = field(default_factory=dict)
    events: list = field(default_factory=list)
    queued_bytes: int = 0
    turns: int = 0
    passed_s: float = 0.0
    is_ready: bool = False
    has_begun: bool = False
    fired: int = 0
    num_acts: int = 0

    @property
    def event_bytes(self) -> int:
        """What its events take in the audit log."""
        return sum(len(json.dumps(event)) for event in self.events)


class Stage:
    """Everything that schedules share: certificates, models, the weights of honest runs, recorded sessions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pki = directory / "pki"
        create_authority(self._pki)
        for name in ("owner", *(f"worker-{n}" for n in range(1, MAX_WORKERS + 1))):
            issue_certificate(self._pki, name)
        self._honest: dict[tuple[str, int], str] = {}
        self._earlier: dict[str, dict[str, list]] = {}

    def honest(self, company: str, num_steps: int) -> str:
        """The weights of an honest and unguarded run."""
        if (company, num_steps) not in self._honest:
            run = COMPANIES[company].run(self._pki)
            bare = run.model_copy(update={"guard": GuardConfig(mode="off", shadow=run.guard.shadow)})
            with self._open(bare) as opened:
                opened.run(num_steps)
                self._honest[company, num_steps] = opened.weights_digest()
        return self._honest[company, num_steps]

    def earlier(self, company: str) -> dict[str, list]:
        """What each worker saw in an honest session on other batches, with the same certificates."""
        if company not in self._earlier:
            run = COMPANIES[company].run(self._pki)
            other = run.model_copy(update={"train": run.train.model_copy(update={"seed": run.train.seed + 1})})
            names = run.pipeline.worker_names
            seen = {name: [] for name in names}
            with self._open(other, session=CompanySession("an-earlier-session"), noted=seen) as opened:
                opened.run(2)
            self._earlier[company] = seen
        return self._earlier[company]

    def play(self, schedule: Schedule) -> Outcome:
        """Play it to its end, whatever that is."""
        kind = COMPANIES[schedule.company]
        run = kind.run(self._pki)
        earlier = self.earlier(schedule.company) if _looks_back(schedule) else {}
        allies, parties = {}, run.pipeline.worker_names
        actors, insiders = {}, {}
        for number, liar in schedule.liars.items():
            name = f"worker-{number}"
            insider = Insider(liar.acts, Known(earlier=earlier.get(name, ()), allies=allies), parties)
            insiders[name] = insider
            base = Actor()
            if liar.attack != "none":
                stages = tuple(range(1, kind.stages - 1))
                base = make_actor(AttackConfig(kind=liar.attack, from_step=liar.from_step, stages=stages), name)
            actors[name] = replace(base, rewrite=_both(base.rewrite, insider.rewrite))
        noted = {name: insider.known.headers for name, insider in insiders.items()}
        outcome = Outcome()
        company = self._open(run, actors, order=schedule.order, noted=noted)
        for name, insider in insiders.items():
            insider.known.identity = company.party_identity(name)
        try:
            with company:
                # the one copy beside a liar's may be gone for an honest reason, or a league have had both
                kills = any(what == "kill" for _, what, _ in schedule.events)
                may_fall_back = kills or len(schedule.liars) > 1
                if may_fall_back:
                    company.save_step()
                outcome.is_ready = True
                outcome.weights = _train(company, schedule.events, may_fall_back=may_fall_back)
        except EndlessError:
            raise
        except Exception as exc:  # noqa: BLE001 - how it ended is what is judged
            outcome.ended = exc
        outcome.evicted, outcome.lost = company.evicted, company.lost
        outcome.crashes, outcome.errors, outcome.events = company.crashes, company.errors, company.events
        outcome.queued_bytes, outcome.turns = company.most_queued_bytes, company.turns.num_given
        outcome.passed_s = company.clock.awake_seconds()
        # where one party alone has what an update needs, a run begins when the owner has the first checkpoint
        outcome.has_begun = company.has_begun and outcome.is_ready
        outcome.fired = sum(len(insider.fired) for insider in insiders.values())
        outcome.num_acts = sum(len(liar.acts) for liar in schedule.liars.values())
        return outcome

    def faults(self, schedule: Schedule, outcome: Outcome) -> list[str]:
        """Which invariants do not hold."""
        kind = COMPANIES[schedule.company]
        liars = {f"worker-{number}" for number in schedule.liars}
        moved = {f"worker-{number}" for _, _, number in schedule.events}
        found = []
        if outcome.ended is not None and not _may_end(outcome, liars):
            found.append(f"the run ended: {outcome.ended!r}")
        if set(outcome.evicted) - liars:
            found.append(f"honest and convicted: {sorted(set(outcome.evicted) - liars)}")
        if set(outcome.lost) - liars - moved:
            found.append(f"honest and lost: {sorted(set(outcome.lost) - liars - moved)}")
        found += [
            f"{name} is honest and crashed: {exc!r}" for name, exc in outcome.crashes.items() if name not in liars
        ]
        ended = {name: exc for name, exc in outcome.errors.items() if name not in liars | moved}
        found += [f"{name} is honest and ended: {exc!r}" for name, exc in ended.items() if outcome.ended is None]
        if kind.is_exact and outcome.ended is None and outcome.weights != self.honest(schedule.company, NUM_STEPS):
            found.append("the weights are not those of the honest run")
        size = outcome.event_bytes
        if size > NUM_STEPS * MAX_EVENT_BYTES:
            found.append(f"{size} bytes of events in {NUM_STEPS} steps")
        if outcome.queued_bytes > 2 * MAX_QUEUED_BYTES:
            found.append(f"{outcome.queued_bytes} bytes lay in one inbox from one sender")
        if outcome.passed_s > (NUM_STEPS + 1) * STEP_TIMEOUT_S:
            found.append(f"{outcome.passed_s:.0f} s passed")
        return found

    def _open(self, run, actors=None, *, noted=None, **kwargs):
        directory = self.directory / "company"
        # nothing of the last one is read again
        shutil.rmtree(directory, ignore_errors=True)
        return TurnCompany(run, directory, actors, cache=self.directory / "models", noted=noted or {}, **kwargs)


def _may_end(outcome: Outcome, liars: set[str]) -> bool:
    """A run that has not begun may refuse to, if its error names the party in the way and no other."""
    named = set(re.findall(r"worker-\d+", str(outcome.ended)))
    return isinstance(outcome.ended, PhalanxError) and not outcome.has_begun and bool(named) and named <= liars


def _looks_back(schedule: Schedule) -> bool:
    """Whether a deed takes something from an earlier session, which then has to be played first."""
    deeds = [act.deed for liar in schedule.liars.values() for act in liar.acts]
    changes = [getattr(one, "change", None) for deed in deeds for one in (deed, *getattr(deed, "changes", ()))]
    return any(getattr(one, "earlier", False) for one in (*deeds, *changes))


def _both(first, second):
    return lambda outgoing: [last for one in first(outgoing) for last in second(one)]


def _train(company, events, *, may_fall_back):
    """Every step and the end, as a session has it; where the upkeep has no successors, again from the last checkpoint.

    Returns:
        The digest of the final weights, for which the last step's states are agreed on and audited.
    """
    falls, step, happened = 0, 0, set()
    while True:
        for event in events:
            if event[0] == step and event not in happened:
                happened.add(event)
                _happen(company, event[1], f"worker-{event[2]}")
        try:
            if step == NUM_STEPS:
                return company.weights_digest()
            company.run(1)
            step += 1
        except NoHolderError:
            falls += 1
            if not may_fall_back or falls > MAX_WORKERS:
                raise
            step = company.fall_back()


def _happen(company, what, name):
    """Something happens to an honest party that has nothing to do with lies."""
    match what:
        case "join":
            company.start_worker(name)
        case "leave":
            company.ask_to_leave(name)
        case "kill":
            company.kill_worker(name)
