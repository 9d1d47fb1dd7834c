"""The middle stages of an enclave's pipeline, for the owner of the run: workers to start, and the enclave's reports."""

import contextlib
from collections.abc import Iterator
from typing import Any

from phalanx.errors import FrameError, PeerLostError
from phalanx.pipeline import Observe, StageChecks
from phalanx.split import ENCLAVE
from phalanx.split.channel import messages as say
from phalanx.split.channel.message import SplitMessage
from phalanx.train.config import SplitPipelineRun, SplitRun
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.history import read_history
from phalanx.train.records.run_directory import RunDirectory, is_made
from phalanx.train.records.summary import Figures
from phalanx.train.records.unstarted import MIDDLE
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.sessions.cluster import OpenWorkers, WorkerProcesses, worker_config
from phalanx.train.sessions.enclave_owner import CHECKED

WORKERS_SEE = (
    "the workers of the middle stages see hidden states, their gradients and their stages' adapters in the clear; "
    "text can be reconstructed from these: it is secret from everybody except these workers and their machines"
)
"""What a run with such workers is not worth, for terminal, summary and report."""

_TOLD = frozenset(
    {
        *("party_joined", "not_let_in", "respawned", "lost", "replaced", "evicted", "revoked", "takeover"),
        *("alarm", "drift", "doubts_not_followed", "verdict", "verdict_refused", "distrusted"),
        *("guarantees", "guarantee_weaker", "rolled_back", "step_repeated"),
    }
)
"""Events of the enclave's log that the log of the run has as well."""


class MiddleStages:
    """The middle stages of a session: processes that the enclave asks for, and its reports on them."""

    def __init__(self, run: SplitPipelineRun, home: RunDirectory, workers: WorkerProcesses, note: Observe) -> None:
        self.home = home
        self.run, self._workers, self._note = run, workers, note
        self._awaited: set[str] = set()

    def serve_enclave_message(self, message: SplitMessage) -> bool:
        """Serve the enclave's requests, and take its reports."""
        match message:
            case say.WorkersWanted():
                self._start_workers(message)
            case say.WorkerDismissed():
                self._workers.dismiss_worker(message.name)
            case say.GuardEvent():
                if message.event == "party_joined":
                    self._awaited.discard(str(message.facts.get("party")))
                try:
                    self._note(message.event, message.facts)
                except (KeyError, TypeError, ValueError, AttributeError) as exc:
                    raise FrameError(f"{ENCLAVE}: reported {message.event!r} without {exc}") from exc
            case _:
                return False
        return True

    def _start_workers(self, wanted: say.WorkersWanted) -> None:
        strangers = sorted(set(wanted.names) - set(self.run.stage_workers))
        if strangers:
            raise FrameError(f"{ENCLAVE}: requested {strangers[0]!r}, which is not a worker of this run")
        self._awaited |= set(wanted.names)
        files = {name: worker_config(self.run, self.home, name, wanted.address) for name in wanted.names}
        self._workers.start_workers(files)

    def check_joining_workers(self) -> None:
        """Return while every worker that is still to join runs."""
        for name in sorted(self._awaited):
            if not self._workers.is_worker_alive(name):
                raise PeerLostError(f"{name} ended before it joined: {self._workers.worker_output(name)}")

    def close(self) -> None:
        """Wait for the workers, which the enclave has told that the run is over."""
        self._workers.close()


def middle_directory(run: SplitPipelineRun, home: RunDirectory) -> RunDirectory:
    """The directory of an enclave's pipeline, with keys of an authority of its own."""
    path = home.path / MIDDLE
    with RunDirectory(path, run, resume=is_made(path), parties=run.stage_workers) as middle:
        # the directory around it is this process's alone
        return middle


@contextlib.contextmanager
def middle_stages(
    run: SplitRun, home: RunDirectory, open_workers: OpenWorkers, note: Observe
) -> Iterator[MiddleStages | None]:
    """Make ready for the workers of an enclave's pipeline, and end them whatever happens; None where it has none.

    Args:
        open_workers: Starts workers; another than the default is for drills only.
    """
    if not isinstance(run, SplitPipelineRun):
        yield None
        return
    middle = middle_directory(run, home)
    with open_workers(home.path / "workers") as workers:
        yield MiddleStages(run, middle, workers, note)


def count_logged_decisions(middle: RunDirectory, figures: Figures) -> None:
    """Count what earlier sessions decided, from the log that the enclave has signed."""
    history = read_history(middle.path / LOG_FILE, middle.owner.public, middle.run_id)
    for kind, body in history.decisions:
        figures.observe(kind, body)


def note_guard_events(figures: Figures, savepoint: Savepoint, observe: Observe) -> Observe:
    """What takes the events of an enclave's guard, which are its word, into figures and the log of the run."""

    def note(kind: str, facts: dict[str, Any]) -> None:
        if kind == CHECKED:
            stages = {int(stage): _parse_checks(stage_facts) for stage, stage_facts in facts["stages"].items()}
            figures.checks.note_applied(int(facts["step"]), stages)
        elif kind in _TOLD:
            if kind == "rolled_back":
                savepoint.forget_after(int(facts["to"]))
            evidence = facts.get("evidence")
            observe(kind, facts | ({"evidence": f"{MIDDLE}/{evidence}"} if isinstance(evidence, str) else {}))

    return note


def _parse_checks(claims: dict[str, Any]) -> StageChecks:
    rests_on = claims["rests_on"]
    return StageChecks(
        frozenset(claims["made"]), str(claims["party"]), None if rests_on is None else frozenset(map(str, rests_on))
    )
