"""The middle stages of an enclave's pipeline, from outside: what is started, what is told, and what binds a state."""

import pytest

from phalanx.errors import CheckpointError, ConfigError, FrameError, PeerLostError, RollbackError
from phalanx.models import LoraConfig
from phalanx.pipeline import StageChecks
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity
from phalanx.split import SplitConfig
from phalanx.split.channel import messages as say
from phalanx.testing import tiny_run
from phalanx.testing.tiny import with_split
from phalanx.train import SplitRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures
from phalanx.train.records.unstarted import is_unstarted
from phalanx.train.sessions.cluster import worker_config
from phalanx.train.sessions.enclave_owner import CHECKED, AskedWorkers, check_log_end, log_end_of
from phalanx.train.sessions.middle_stages import MiddleStages, middle_directory, middle_stages, note_guard_events

VERDICT = {
    "party": "worker-1",
    "stage": 1,
    "step": 4,
    "offence": "message",
    "reason": "wrong",
    "evidence": "evidence/a.json",
}


class NotedProcesses:
    """Processes that are noted and not started."""

    def __init__(self):
        self.started, self.ended, self.dead = {}, [], set()

    def start_workers(self, configs):
        self.started |= configs

    def start_fork_server(self, threads):
        raise AssertionError("an enclave's host needs none")

    def is_worker_alive(self, name):
        return name not in self.dead

    def dismiss_worker(self, name):
        self.ended.append(name)

    def worker_output(self, name):
        return "out of memory"

    def close(self):
        self.ended.append("all")


class NotedSavepoint:
    def __init__(self):
        self.forgotten = []

    def forget_after(self, step):
        self.forgotten.append(step)


@pytest.fixture
def run():
    split = SplitConfig(cut=1, clients=2, allow_insecure_sim=True, workers_see_hidden_states=True)
    return with_split(tiny_run(4, adapter=LoraConfig(rank=2)), split)


@pytest.fixture
def home(run, tmp_path):
    return RunDirectory(tmp_path / "run", run, resume=False)


@pytest.fixture
def noted():
    return []


@pytest.fixture
def stages(run, home, noted):
    return MiddleStages(run, middle_directory(run, home), NotedProcesses(), lambda *event: noted.append(event))


def wanted(*names):
    return say.WorkersWanted(names=names, address="127.0.0.1:7")


def test_workers_and_the_owner_of_their_pipeline_have_an_authority_of_their_own(run, home):
    middle = middle_directory(run, home)

    assert {path.name for path in middle.pki_directory.iterdir() if path.is_dir()} == {"owner", "worker-1", "worker-2"}
    assert {path.name for path in home.pki_directory.iterdir() if path.is_dir()} == {
        "owner",
        "enclave",
        "client-0",
        "client-1",
    }
    assert middle.owner.authority_pem != home.owner.authority_pem
    assert middle_directory(run, home).run_id == middle.run_id, "a resumed session finds it"


def test_a_split_whose_workers_see_nothing_has_no_middle_stages(run, home):
    alone = SplitRun(**{name: getattr(run, name) for name in run.written if name in SplitRun.model_fields})

    with middle_stages(alone, home, pytest.fail, pytest.fail) as middle:
        assert middle is None


def test_a_worker_that_the_enclave_asks_for_is_started_with_its_keys_and_the_address(stages):
    assert stages.serve_enclave_message(wanted("worker-1", "worker-2"))

    started = stages._workers.started
    assert list(started) == ["worker-1", "worker-2"]
    assert {config.owner for config in started.values()} == {"127.0.0.1:7"}
    assert started["worker-1"].identity == str((stages.home.pki_directory / "worker-1").resolve())


def test_a_worker_that_the_run_has_not_is_not_started(stages):
    with pytest.raises(FrameError, match="'worker-9', which is not a worker of this run"):
        stages.serve_enclave_message(wanted("worker-1", "worker-9"))

    assert stages._workers.started == {}


def test_a_worker_that_ends_before_it_has_joined_ends_the_session_and_later_ones_are_the_enclaves_to_miss(stages):
    stages.serve_enclave_message(wanted("worker-1", "worker-2"))
    stages.serve_enclave_message(say.GuardEvent(event="party_joined", facts={"party": "worker-1"}))

    stages._workers.dead = {"worker-1"}
    stages.check_joining_workers()
    stages._workers.dead = {"worker-2"}
    with pytest.raises(PeerLostError, match="worker-2 ended before it joined: out of memory"):
        stages.check_joining_workers()


def test_a_dismissed_worker_is_ended_and_an_answer_is_nothing_aside(stages):
    assert stages.serve_enclave_message(say.WorkerDismissed(name="worker-1"))
    assert not stages.serve_enclave_message(say.WeightsReply(digest="ab" * 32))

    assert stages._workers.ended == ["worker-1"]


def test_the_enclave_asks_for_processes_by_name_and_starts_none(stages, run):
    told = []
    asked = AskedWorkers(told.append)
    configs = {name: worker_config(run, stages.home, name, "127.0.0.1:7") for name in run.pipeline.worker_names}

    asked.start_workers({})
    asked.start_workers(configs)
    asked.dismiss_worker("worker-2")

    assert told == [wanted("worker-1", "worker-2"), say.WorkerDismissed(name="worker-2")]


@pytest.fixture
def figures():
    return Figures()


@pytest.fixture
def note(figures, noted):
    savepoint = NotedSavepoint()

    def observe(kind, body):
        figures.observe(kind, body)
        noted.append((kind, body))

    found = note_guard_events(figures, savepoint, observe)
    return found, savepoint


def test_a_verdict_is_counted_and_its_evidence_is_where_the_enclave_keeps_it(note, figures, noted):
    note[0]("verdict", VERDICT)

    ((kind, body),) = noted
    assert (kind, body["evidence"]) == ("verdict", "middle/evidence/a.json")
    assert [one["party"] for one in figures.verdicts] == ["worker-1"]


@pytest.mark.parametrize("kind", ["checkpoint_saved", "run_completed", "run_started", "step", "audit_key_revealed"])
def test_the_enclave_cannot_speak_for_the_owner_of_the_run(note, noted, kind):
    note[0](kind, {"step": 3})

    assert noted == []


def test_what_was_checked_is_in_the_record_of_checks(note, figures):
    told = {"step": 0, "stages": {"1": {"made": ["sampled"], "party": "worker-1", "rests_on": None}}}

    note[0](CHECKED, told)

    expected = Figures()
    expected.checks.note_applied(0, {1: StageChecks(frozenset({"sampled"}), "worker-1", None)})
    assert figures.checks.to_json() == expected.checks.to_json()


def test_checkpoints_that_hold_what_is_undone_are_removed(note):
    note[0]("rolled_back", {"step": 9, "to": 4, "reason": "", "party": "worker-1"})

    assert note[1].forgotten == [4]


@pytest.mark.parametrize("facts", [{}, {"party": "worker-1"}, {**VERDICT, "step": None, "offence": "state"}])
def test_a_malformed_verdict_is_refused(run, home, note, facts):
    stages = MiddleStages(run, middle_directory(run, home), NotedProcesses(), note[0])

    with pytest.raises(FrameError, match="reported 'verdict'"):
        stages.serve_enclave_message(say.GuardEvent(event="verdict", facts=facts))


# --- what a sealed state knows of the log ----------------------------------------------------------


def test_a_state_is_refused_beside_a_log_that_lacks_lines_of_its_time(tmp_path):
    identity, path = Identity.without_certificate("owner"), tmp_path / "events.jsonl"
    with AuditLog(path, identity, "run") as log:
        log.append_event("run_started", {})
        before = path.read_bytes()
        log.append_event("verdict", VERDICT)
        books = log_end_of(log)
        log.append_event("evicted", {"party": "worker-1"})
        check_log_end(log, books)

    path.write_bytes(before)
    with AuditLog(path, identity, "run") as log, pytest.raises(RollbackError, match="maybe a conviction"):
        check_log_end(log, books)


@pytest.mark.parametrize("books", [{}, {"num_events": "1", "digest": "ab"}, {"num_events": 1}])
def test_a_state_of_an_enclave_without_a_pipeline_is_refused(tmp_path, books):
    identity = Identity.without_certificate("owner")

    with (
        AuditLog(tmp_path / "events.jsonl", identity, "run") as log,
        pytest.raises(CheckpointError, match="without a pipeline"),
    ):
        check_log_end(log, books)


# --- a run that has not finished a step ------------------------------------------------------------


def test_a_run_that_begins_anew_has_new_keys_of_its_middle_stages_as_well(run, home):
    before = middle_directory(run, home).owner.authority_pem
    home.close()

    with RunDirectory(home.path, run, resume=False) as again:
        assert again.begun_anew
        assert middle_directory(run, again).owner.authority_pem != before


def test_a_step_that_the_enclave_alone_knows_of_keeps_a_run_from_beginning_anew(run, home):
    (middle_directory(run, home).path / "steps.jsonl").write_text("{}\n")
    home.close()

    assert not is_unstarted(home.path)
    with pytest.raises(ConfigError, match="already has a run"):
        RunDirectory(home.path, run, resume=False)
