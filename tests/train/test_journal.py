"""A run that is stopped in the middle goes on at its last verified step, whatever its last checkpoint is."""

import json
import shutil

import pytest

from phalanx.checkpoint.state_files import read_state, state_path
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import open_model
from phalanx.pipeline import OWNER
from phalanx.pipeline.owner.verified_step import VerifiedStep
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train.records.journal import read_entry, read_kept_states
from phalanx.train.sessions import hooks
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@pytest.fixture
def journaled(make_run):
    return lambda *more: make_run("checkpoint.journal=true", "checkpoint.every=0", *more)


@pytest.fixture
def died(journaled, quietly, tmp_path, monkeypatch):
    """A run without a checkpoint that was stopped inside step 4, after its states were noted and before its update."""
    honest = VerifiedStep.apply_step

    def stop(self, step, *rest):
        if step == 4:
            self._context.notes.note_verified_states()
            raise KeyboardInterrupt
        return honest(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(VerifiedStep, "apply_step", stop)
        assert quietly(journaled(), tmp_path / "run")["status"] == "interrupted"
    return tmp_path / "run"


@pytest.fixture(scope="module")
def undisturbed(trained_once):
    return trained_once[0]["final_weights_digest"]


def test_it_goes_on_at_the_step_where_it_died(journaled, quietly, died, undisturbed):
    summary = quietly(journaled(), died, resume=True)

    assert (summary["status"], summary["resumed_from"], summary["steps"]) == ("completed", 4, 6)
    assert summary["final_weights_digest"] == undisturbed
    assert [line["step"] for line in read_metrics(died / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert "continues where it ended, at step 4" in summary["shown"]


@pytest.mark.parametrize("num_steps", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 3, 5))])
def test_between_two_steps_one_step_is_done_again(journaled, quietly, tmp_path, monkeypatch, undisturbed, num_steps):
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            raise KeyboardInterrupt
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        quietly(journaled(), tmp_path / "run")

    summary = quietly(journaled(), tmp_path / "run", resume=True)

    assert summary["resumed_from"] in (num_steps - 1, None if num_steps == 1 else num_steps - 1)
    assert summary["final_weights_digest"] == undisturbed


def test_it_can_die_again_right_after(journaled, quietly, died, undisturbed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "note_position", lambda self, step: (_ for _ in ()).throw(KeyboardInterrupt))
        assert quietly(journaled(), died, resume=True)["status"] == "interrupted"

    summary = quietly(journaled(), died, resume=True)

    assert (summary["resumed_from"], summary["final_weights_digest"]) == (4, undisturbed)


def test_a_complete_run_keeps_no_journal(journaled, quietly, tmp_path):
    quietly(journaled(), tmp_path / "run")

    assert not (tmp_path / "run" / "journal").exists()


def alter_body(journal):
    text = (journal / "journal.json").read_text()
    (journal / "journal.json").write_text(text.replace('"step":4', '"step":5'))


def alter_signature(journal):
    found = json.loads((journal / "journal.json").read_text())
    found["signature"] = "00" * 64
    (journal / "journal.json").write_text(json.dumps(found, sort_keys=True, separators=(",", ":")))


def flip_a_bit(journal):
    path = state_path(journal, 0, OWNER, 4)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def swap_steps(journal):
    shutil.copyfile(state_path(journal, 0, OWNER, 3), state_path(journal, 0, OWNER, 4))


def lose_a_stage(journal):
    state_path(journal, 1, OWNER, 4).unlink()


@pytest.mark.quick_cases("flip_a_bit")
@pytest.mark.parametrize(
    "spoil",
    [
        alter_signature,
        flip_a_bit,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (alter_body, swap_steps, lose_a_stage)),
    ],
)
def test_what_is_not_as_it_was_noted_is_not_gone_on_from(journaled, quietly, died, undisturbed, spoil):
    spoil(died / "journal")

    summary = quietly(journaled(), died, resume=True)

    assert "journal: " in summary["shown"]
    assert "continues from its last checkpoint" in " ".join(summary["shown"].split())
    assert summary["resumed_from"] == 0
    assert summary["final_weights_digest"] == undisturbed


def test_no_word_of_a_worker_about_its_state_ends_the_owner_or_styles_its_terminal(
    journaled, quietly, died, undisturbed, monkeypatch
):
    """A remote worker says why it has no state: a tag that closes nothing was an error of the terminal's library."""

    def ask_worker(*_):
        raise CheckpointError("stage 1: worker-2 has no state of step 4: [/gone] [link=https://example.org]lost[/link]")

    monkeypatch.setattr("phalanx.train.sessions.pipeline.read_kept_states", ask_worker)
    summary = quietly(journaled(), died, resume=True)

    assert "[/gone] [link=https://example.org]lost[/link]; the run continues" in " ".join(summary["shown"].split())
    assert (summary["resumed_from"], summary["final_weights_digest"]) == (0, undisturbed)


def test_a_state_that_was_undone_after_it_was_noted_is_not_gone_on_from(journaled, quietly, died, undisturbed):
    run = json.loads((died / "run.json").read_text())["run"]
    with AuditLog(died / "events.jsonl", load_identity(died / "pki" / "owner"), run) as log:
        log.append_event("rolled_back", {"step": 4, "to": 2})

    summary = quietly(journaled(), died, resume=True)

    assert "its steps were undone since" in " ".join(summary["shown"].split())
    assert (summary["resumed_from"], summary["final_weights_digest"]) == (0, undisturbed)


def test_the_journal_of_another_run_is_not_gone_on_from(journaled, quietly, died, tmp_path, monkeypatch):
    shutil.copytree(died, tmp_path / "other")
    shutil.copyfile(died / "journal" / "journal.json", tmp_path / "stolen.json")
    quietly(journaled("train.seed=9"), tmp_path / "third", resume=False)
    (tmp_path / "third" / "summary.json").unlink()
    shutil.copytree(died / "journal", tmp_path / "third" / "journal")

    summary = quietly(journaled("train.seed=9"), tmp_path / "third", resume=True)

    assert "not signed by" in summary["shown"]


def test_an_older_journal_in_the_place_of_the_newest_checkpoint_changes_nothing(journaled, quietly, died, tmp_path):
    shutil.copytree(died / "journal", tmp_path / "old")
    first = quietly(journaled(), died, resume=True)
    (died / "summary.json").unlink()
    shutil.copytree(tmp_path / "old", died / "journal")

    again = quietly(journaled(), died, resume=True)

    assert (again["resumed_from"], again["final_weights_digest"]) == (6, first["final_weights_digest"])


@pytest.fixture
def noted(journaled, died, cache):
    """What the owner noted before it died, as if another machine had held the last stage, and a builder of stages."""
    run = journaled()
    source = open_model(run.model, cache / "models", run.train.seed)
    entry = read_entry(died / "journal", load_identity(died / "pki" / OWNER).public)
    elsewhere = {**entry.stages, "1": entry.stages["1"].model_copy(update={"party": "north"})}
    return entry.model_copy(update={"stages": elsewhere}), StageLibrary(source, make_plan(run, source), None)


def north_keeps(directory, spoil=lambda state: None):
    """A machine that has the last stage's state on its own disk, and what it answers."""

    def fetch(party, stage, step, expected):
        assert (party, stage) == ("north", 1)
        state = read_state(state_path(directory, stage, OWNER, step), step)
        assert state.keys() == expected.keys()
        spoil(state)
        return state

    return fetch


def test_what_another_machine_has_kept_is_gone_on_from_if_it_is_what_was_verified(died, noted):
    entry, library = noted

    shards = list(read_kept_states(died / "journal", entry, library, north_keeps(died / "journal")))

    assert [(shard.stage, shard.num_steps) for shard in shards] == [(0, 4), (1, 4)]


def test_a_machine_that_sends_another_state_than_was_verified_is_named_and_not_gone_on_from(died, noted):
    entry, library = noted
    fetch = north_keeps(died / "journal", lambda state: next(iter(state.values())).view(-1)[0].add_(1e-6))

    with pytest.raises(CheckpointError, match="stage 1, kept by north: differs from the verified state"):
        list(read_kept_states(died / "journal", entry, library, fetch))


def test_what_nobody_has_verified_is_not_taken_from_another_machine(died, noted):
    entry, library = noted
    unverified = {**entry.stages, "1": entry.stages["1"].model_copy(update={"digest": None})}

    with pytest.raises(CheckpointError, match="was not verified"):
        list(
            read_kept_states(
                died / "journal",
                entry.model_copy(update={"stages": unverified}),
                library,
                north_keeps(died / "journal"),
            )
        )


CANNOT = [
    ("train.device=cuda",),
    ("checkpoint.encrypt=true", "checkpoint.key=env:KEY"),
    ("pipeline.stages=3", "pipeline.pki=somewhere", "pipeline.remote_workers=['a']", "guard.mode=off"),
]


@pytest.mark.parametrize("overrides", CANNOT, ids=lambda overrides: overrides[0])
def test_a_journal_that_cannot_be_kept_is_refused_where_it_is_asked_for_and_left_out_where_not(make_run, overrides):
    run = make_run(*overrides)
    silent = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"journal": None})})

    assert not silent.journals
    with pytest.raises(ConfigError, match=r"checkpoint\.journal = true"):
        make_run("checkpoint.journal=true", *overrides)


def test_a_journal_is_kept_where_nothing_is_said_about_it(make_run):
    run = make_run()

    assert run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"journal": None})}).journals


def test_with_remote_workers_a_journal_is_kept_as_well(make_run):
    remote = ("pipeline.stages=3", "pipeline.pki=somewhere", "pipeline.remote_workers=['a']")
    silent = make_run(*remote)
    silent = silent.model_copy(update={"checkpoint": silent.checkpoint.model_copy(update={"journal": None})})

    assert silent.journals
    assert make_run("checkpoint.journal=true", *remote).journals
    assert not make_run("checkpoint.journal=false", *remote).journals
