"""Drills: a run file is shortened and nothing else, and a drill is passed only by a guard that held."""

from pathlib import Path

import pytest

from phalanx.attacks import ATTACKS
from phalanx.bench.drills import Drill, drill_runs, has_held, list_attacks, row_of, run_drill
from phalanx.errors import ConfigError, TrainingError
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import tiny_run

CLEAN = {"final_weights_digest": "clean", "validation_perplexity": 9.0, "false_accusations": 0}
CAUGHT = CLEAN | {
    "attacked_steps": [4, 5],
    "evicted": ["worker-1"],
    "verdicts": [{"party": "worker-1", "step": 5, "offence": "message"}],
}
LIAR = AttackConfig(kind="sign_flip")


def row(**changes):
    return row_of(LIAR, CAUGHT | changes, CLEAN)


class Trainer:
    """Stands in for training; says what each attack comes to, and remembers what it was given."""

    def __init__(self, fault=None):
        self.runs = {}
        self._fault = fault

    def __call__(self, run, directory):
        self.runs[directory.name] = run
        if self._fault is not None and run.attack.kind == self._fault:
            directory.mkdir()
            (directory / "summary.json").write_text('{"attacked_steps": [4], "evicted": ["worker-1"]}')
            raise TrainingError("it fell over")
        return CLEAN if run.attack.kind == "none" else CAUGHT


def test_a_drill_keeps_the_run_and_shortens_it():
    run = tiny_run(guard=GuardConfig(audit_rate=0.5))

    runs = drill_runs(run, Drill(kinds=["sign_flip", "framing"], steps=6, from_step=1, rate=0.5))

    assert list(runs) == ["none", "sign_flip", "framing"]
    for short in runs.values():
        assert short.train.steps == 6
        assert (short.model, short.data, short.guard) == (run.model, run.data, run.guard)
    assert (runs["framing"].attack.rate, runs["framing"].attack.stages) == (0.5, (1,))


def test_a_long_warm_up_is_shortened_too():
    run = tiny_run()
    slow = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"warmup_steps": 50})})

    assert drill_runs(slow, Drill(steps=8))["none"].optimizer.warmup_steps == 7


def test_two_colluders_are_placed_next_to_each_other():
    assert drill_runs(tiny_run(), Drill(kinds=["colluders"]))["colluders"].attack.stages == (1, 2)


@pytest.mark.parametrize(
    ("drill", "message"),
    [
        (Drill(kinds=["sine_flip"]), "'sine_flip'; choices: none, adaptive"),
        (Drill(stages=[3]), "only the middle stages"),
        (Drill(steps=4), "nobody lies before step 4; raise --steps"),
        (Drill(kinds=[]), "give --kinds"),
    ],
)
def test_a_drill_that_cannot_be_is_refused_before_anything_is_trained(drill, message, tmp_path: Path):
    trainer = Trainer()

    with pytest.raises(ConfigError, match=message):
        run_drill(tiny_run(), drill, tmp_path, trainer)

    assert trainer.runs == {}


def test_a_caught_attacker_passes_the_drill(tmp_path: Path):
    result = run_drill(tiny_run(), Drill(kinds=["sign_flip"]), tmp_path, Trainer())

    clean, attacked = result["rows"]
    assert result["passed"] is True
    assert (clean["attack"], clean["detected"]) == ("none", None)
    assert (attacked["detected"], attacked["blamed"], attacked["steps_to_detection"]) == (True, ["worker-1"], 1)
    assert (attacked["bit_identical"], attacked["perplexity"]) == (True, 9.0)


def test_a_run_that_falls_over_is_shown_and_fails_the_drill(tmp_path: Path):
    result = run_drill(tiny_run(), Drill(kinds=["sign_flip", "zero"]), tmp_path, Trainer(fault="sign_flip"))

    assert result["passed"] is False
    assert [r["error"] for r in result["rows"]] == [None, "TrainingError: it fell over", None]
    assert result["rows"][1]["detected"] is True


def test_an_undisturbed_run_that_fails_ends_the_drill(tmp_path: Path):
    with pytest.raises(TrainingError, match="it fell over"):
        run_drill(tiny_run(), Drill(), tmp_path, Trainer(fault="none"))


@pytest.mark.parametrize(
    "changes",
    [
        {"evicted": [], "verdicts": []},
        {"attacked_steps": []},
        {"false_accusations": 1},
        {"false_accusations": None},
        {"evicted": ["worker-2"]},
    ],
    ids=["undetected", "never took place", "innocent blamed", "nobody knows", "only another one evicted"],
)
def test_a_guard_that_did_not_hold_fails_the_drill(changes):
    assert has_held(row())
    assert not has_held(row(**changes))


def test_who_was_replaced_for_silence_is_caught_and_not_blamed():
    found = row(evicted=[], verdicts=[], lost=["worker-1"])

    assert (found["detected"], found["blamed"], found["steps_to_detection"]) == (True, [], None)
    assert has_held(found)


def test_other_weights_are_seen():
    assert row(final_weights_digest="poisoned")["bit_identical"] is False
    assert row(final_weights_digest=None)["bit_identical"] is None


def test_the_list_says_what_each_attack_does():
    listed = {line["attack"]: line for line in list_attacks()}

    assert listed.keys() == ATTACKS.keys()
    assert all(line["what it does"] and line["caught by"] for line in listed.values())
