"""A run ends when validation brings nothing any more, keeps its best checkpoint, and decides the same after a crash."""

import io
import json
import math

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from phalanx.errors import CheckpointError, ConfigError, NoHolderError, TrainingError
from phalanx.security.crypto import load_identity
from phalanx.train import PastRun
from phalanx.train.records.history import read_history
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures, StoppingRecord, trend_of
from phalanx.train.sessions.session import Session
from phalanx.train.train_section import EarlyStoppingConfig

PATIENT = "train.early_stopping={patience=2}"
EVERY = ("train.steps=12", "train.validate_every=1")
# better until step 3, then never again
CURVE = {0: 9.0, 1: 8.0, 2: 6.0, 3: 5.0, 4: 7.0, 5: 5.5, 6: 1.0}


@pytest.fixture
def session_of(make_run, tmp_path):
    def build(engine, *overrides, resume=False):
        run = make_run(*EVERY, *overrides)
        home = RunDirectory(tmp_path / "run", run, resume=resume)
        return Session(run, home, Console(file=io.StringIO(), width=200), engine).run_session(resume=resume)

    return build


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def kept(run_dir):
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def test_a_run_ends_after_so_many_validations_in_a_row_without_an_improvement(session_of, tmp_path):
    engine = FakeEngine(perplexities=CURVE)

    summary = session_of(engine, PATIENT)

    assert [step for step, _ in engine.seen] == [0, 1, 2, 3, 4]
    assert (summary["status"], summary["steps"]) == ("completed", 5)
    told = {"step": 5, "on": "validation", "best_step": 3, "best_loss": math.log(5.0)}
    assert summary["stopped_early"] == {**told, "validations_without_improvement": 2}
    assert events(tmp_path / "run", "stopped_early") == [summary["stopped_early"]]
    # the result is the model of the end, and it is on the disk
    assert kept(tmp_path / "run")[-1] == 5


def test_a_run_that_improves_to_its_end_is_not_stopped(session_of, tmp_path):
    summary = session_of(FakeEngine(perplexities={n: 20.0 - n for n in range(13)}), PATIENT)

    assert (summary["steps"], summary["stopped_early"]) == (12, None)
    assert events(tmp_path / "run", "stopped_early") == []


def test_an_improvement_must_be_as_large_as_the_run_file_says(session_of):
    # from 100 down by 1 % a validation: 0.01 nats each
    engine = FakeEngine(perplexities={n: 100.0 * 0.99**n for n in range(13)})

    summary = session_of(engine, "train.early_stopping={patience=2,min_improvement=0.1}")

    assert (summary["steps"], summary["stopped_early"]["best_step"]) == (3, 1)


@pytest.mark.parametrize("broken", [math.inf, math.nan, 0.0])
def test_a_loss_that_is_no_finite_number_is_no_improvement(session_of, broken):
    summary = session_of(FakeEngine(perplexities={1: 5.0, 2: broken, 3: broken}), PATIENT)

    assert (summary["steps"], summary["stopped_early"]["best_step"]) == (3, 1)


@pytest.mark.quick_cases("1-2", "2-1", "3-4")
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(session_of, tmp_path, dies_at, every):
    overrides = (PATIENT, f"checkpoint.every={every}", 'checkpoint.best="validation"')
    with pytest.raises(TrainingError):
        session_of(FakeEngine({dies_at: TrainingError("on purpose")}, CURVE), *overrides)

    engine = FakeEngine(perplexities=CURVE)
    summary = session_of(engine, *overrides, resume=True)

    assert (summary["steps"], summary["stopped_early"]["step"], summary["stopped_early"]["best_step"]) == (5, 5, 3)
    assert (summary["best_checkpoint"]["step"], summary["best_checkpoint"]["loss"]) == (3, math.log(5.0))
    assert 3 in kept(tmp_path / "run")


def test_a_run_that_ended_early_stays_ended_when_its_summary_is_lost(session_of, tmp_path):
    first = session_of(FakeEngine(perplexities=CURVE), PATIENT)
    (tmp_path / "run" / "summary.json").unlink()

    engine = FakeEngine(perplexities=CURVE)
    again = session_of(engine, PATIENT, resume=True)

    assert engine.seen == []
    assert (again["steps"], again["stopped_early"]) == (5, first["stopped_early"])


def test_going_back_to_a_checkpoint_takes_the_decisions_since_then_back(session_of):
    engine = FakeEngine({4: NoHolderError("stage 1: no holder is left")}, CURVE)

    summary = session_of(engine, PATIENT, "checkpoint.every=2")

    # validations 3 and 4 are met twice and counted once
    assert [step for step, _ in engine.seen] == [0, 1, 2, 3, 4]
    assert summary["stopped_early"]["step"] == 5


def test_validations_of_steps_that_are_undone_decide_nothing():
    figures = Figures()
    for num_steps, loss in ((2, 3.0), (4, 2.0), (6, 2.5)):
        figures.stopping.add_validation(num_steps, loss, "validation")

    figures.observe("rolled_back", {"step": 7, "to": 4})

    # the model after four steps is the last one that is right
    assert figures.stopping.losses == [(2, 3.0), (4, 2.0)]


def test_what_decides_survives_a_checkpoint_and_nothing_malformed_does():
    figures, again = Figures(), Figures()
    figures.stopping.add_validation(2, 3.0, "wiki")
    figures.stopping.add_validation(4, math.inf, "wiki")

    again.load_json(json.loads(json.dumps(figures.to_json())))

    assert again.stopping == figures.stopping
    for rows in ([[1]], [["2", 3.0]], {"2": 3.0}, [[2, "3"]], [[True, 1.0]], None):
        for saved in (rows, {"on": "wiki", "losses": rows}):
            with pytest.raises(CheckpointError, match="validations"):
                again.load_json({**figures.to_json(), "stopping": saved})


def test_validations_on_another_set_count_no_more_when_the_rule_is_changed():
    record = StoppingRecord()
    for number in (1, 2, 3):
        record.add_validation(number, 3.0, "wiki")
    assert record.is_over(EarlyStoppingConfig(patience=2, on="wiki"))
    assert not record.is_over(EarlyStoppingConfig(patience=2))

    record.add_validation(4, 9.0, "validation")

    assert record.losses == [(4, 9.0)]


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 50.0), max_size=30), st.floats(0.0, 2.0), st.integers(1, 4))
def test_a_decision_follows_from_the_losses_alone(losses, least, patience):
    rule = EarlyStoppingConfig(patience=patience, min_improvement=least)
    record = StoppingRecord()
    ended = None
    for number, loss in enumerate(losses, start=1):
        record.add_validation(number, loss, "validation")
        if ended is None and record.is_over(rule):
            ended = number

    found = trend_of(record.losses, least)
    if losses:
        assert found.best_loss >= min(losses) >= found.best_loss - least
    if ended is not None:
        before = losses[: ended - patience]
        best = trend_of(list(enumerate(before)), least).best_loss
        assert not any(loss < best - least for loss in losses[ended - patience : ended])


# --- the best checkpoint ------------------------------------------------------------------------


def test_the_checkpoint_of_the_best_validation_is_kept_whatever_its_age(session_of, tmp_path):
    curve = {n: 30.0 - n if n <= 5 else 40.0 for n in range(13)}

    summary = session_of(FakeEngine(perplexities=curve), 'checkpoint.best="validation"', "checkpoint.every=4")

    assert kept(tmp_path / "run") == [5, 8, 12]
    told = {"step": 5, "on": "validation", "loss": math.log(25.0), "in_doubt": False}
    assert summary["best_checkpoint"] == told
    assert PastRun(tmp_path / "run").best_step == 5


def test_the_best_checkpoint_is_the_one_that_the_signed_log_names(session_of, tmp_path):
    curve = {n: 30.0 - n if n <= 5 else 40.0 for n in range(13)}
    session_of(FakeEngine(perplexities=curve), 'checkpoint.best="validation"')
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())

    # whoever writes another step into the summary changes nothing
    summary["best_checkpoint"]["step"] = 12
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))

    past = PastRun(tmp_path / "run")
    assert (past.best_step, past.open_verified(past.best_step).step) == (5, 5)


def test_an_earlier_writing_of_the_best_checkpoint_is_not_opened(session_of, tmp_path):
    curve = {n: 30.0 - n if n <= 5 else 40.0 for n in range(13)}
    session_of(FakeEngine(perplexities=curve), 'checkpoint.best="validation"')
    manifest = tmp_path / "run" / "checkpoints" / "step-00000005" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")

    with pytest.raises(CheckpointError, match="swapped"):
        PastRun(tmp_path / "run").open_verified(5)


def test_without_a_best_checkpoint_its_export_says_what_to_do(session_of, tmp_path):
    session_of(FakeEngine())

    with pytest.raises(CheckpointError, match=r"has no checkpoint\.best; choose one with --step"):
        _ = PastRun(tmp_path / "run").best_step


def test_a_best_checkpoint_of_steps_that_are_undone_is_the_best_no_more(session_of, tmp_path):
    curve = {n: 30.0 - n if n <= 5 else 40.0 for n in range(13)}
    session_of(FakeEngine(perplexities=curve), 'checkpoint.best="validation"')
    owner = load_identity(tmp_path / "run" / "pki" / "owner")
    history = read_history(tmp_path / "run" / "events.jsonl", owner.public, PastRun(tmp_path / "run").run_id)
    assert history.certified.best.step == 5

    history.certified.follow_event("rolled_back", {"step": 12, "to": 4})

    assert history.certified.best is None


# --- the run file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.validate_every=0", PATIENT], "early_stopping decides after a validation"),
        (["train.validate_every=0", "checkpoint.best='validation'"], "checkpoint.best compares several"),
        (["train.early_stopping={patience=0}"], "patience"),
        (
            ["train.early_stopping={patience=1,on='wiki'}"],
            "is not a validation set of .data.; expected one of validation",
        ),
        (["checkpoint.best='wiki'"], 'checkpoint.best = "wiki" is not a validation set'),
        (["checkpoint.best='validation'", "data.validation_share=0.0"], "expected one of none"),
    ],
)
def test_a_rule_that_could_never_decide_is_refused(make_run, overrides, said):
    with pytest.raises(ConfigError, match=said):
        make_run(*overrides)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_never_the_best_one(odd):
    found = trend_of([(1, odd), (2, 1.0), (3, odd)], 0.0)

    assert (found.best_step, found.best_loss, found.without) == (2, 1.0, 1)


def test_a_validation_that_is_done_again_takes_the_place_of_the_first():
    record = StoppingRecord()

    for loss in (2.0, 1.0):
        record.add_validation(4, loss, "validation")

    assert record.losses == [(4, 1.0)]


@pytest.mark.parametrize(
    "saved", [{"on": "validation", "losses": [], "more": 1}, {"on": "validation", "losses": [5]}, {"losses": []}, []]
)
def test_a_malformed_record_of_validations_is_refused(saved):
    with pytest.raises(CheckpointError, match="expected steps and losses"):
        StoppingRecord.from_json(saved)
