"""Drills: a run file is shortened and nothing else, and a drill is passed only by a guard that held."""

import json
import tomllib
from pathlib import Path

import pytest

from phalanx.config import digest_config, dump_toml
from phalanx.errors import ConfigError, TrainingError
from phalanx.lab.attacks import ATTACKS, AttackPlan
from phalanx.lab.bench.detection.drill_plan import Drill, DrillRun, drill_scenes
from phalanx.lab.bench.detection.drills import drill_row, has_guard_held, list_attacks, run_drill
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import tiny_run
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

CLEAN = {"final_weights_digest": "clean", "validation_perplexity": 9.0, "false_accusations": 0}
CAUGHT = CLEAN | {
    "attacked_steps": [4, 5],
    "evicted": ["worker-1"],
    "verdicts": [{"party": "worker-1", "step": 5, "offence": "message"}],
}
LIAR = AttackConfig(kind="sign_flip")


def row(**changes):
    found = drill_row(DrillRun(tiny_run(), {"worker-1": LIAR}), CAUGHT | changes, CLEAN)
    return {"attack": "sign_flip", **found}


def attacks(run, drill):
    return {name: scene.run.attack for name, scene in drill_scenes(run, drill).items()}


def run_with(text, *overrides, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tiny_run_file(f"[pipeline]\nstages = 4\n{text}"))
    return load_run(path, overrides)


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

    scenes = drill_scenes(run, Drill(kinds=["sign_flip", "framing"], steps=6, from_step=1, rate=0.5))
    runs = {name: scene.run for name, scene in scenes.items()}

    assert list(runs) == ["none", "sign_flip", "framing"]
    for short in runs.values():
        assert short.train.steps == 6
        assert (short.model, short.data, short.guard) == (run.model, run.data, run.guard)
    assert (runs["framing"].attack.rate, runs["framing"].attack.stages) == (0.5, (1,))


def test_a_drill_of_a_run_that_is_counted_in_epochs_has_steps_of_its_own(tmp_path):
    counted = run_with("", "train.epochs=2", "train.steps=0", tmp_path=tmp_path)

    short = drill_scenes(counted, Drill(steps=6))["none"].run

    assert (counted.train.epochs, short.train.epochs, short.train.steps) == (2, None, 6)


def test_a_long_warm_up_is_shortened_too():
    run = tiny_run()
    slow = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"warmup_steps": 50})})

    assert drill_scenes(slow, Drill(steps=8))["none"].run.optimizer.warmup_steps == 7


def test_two_colluders_are_placed_next_to_each_other():
    assert attacks(tiny_run(), Drill(kinds=["colluders"]))["colluders"].stages == (1, 2)


ATTACK = """
[attack]
kind = "scale"
stages = [2]
direction = "backward"
strength = 3.5
rate = 0.25
from_step = 7
until_step = 12
seed = 41
"""
AS_WRITTEN = {
    "kind": "scale",
    "stages": (2,),
    "direction": "backward",
    "strength": 3.5,
    "rate": 0.25,
    "from_step": 7,
    "until_step": 12,
    "seed": 41,
}


def test_what_the_run_file_says_of_an_attack_holds_in_a_drill(tmp_path):
    found = attacks(run_with(ATTACK, tmp_path=tmp_path), Drill())

    assert list(found) == ["none", "scale"]
    assert found["scale"] == AttackConfig(**AS_WRITTEN)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"rate": 1.0}, {"rate": 1.0}),
        ({"from_step": 3}, {"from_step": 3}),
        ({"stages": (1,)}, {"stages": (1,)}),
        ({"kinds": ("gaussian_added",)}, {"kind": "gaussian_added"}),
    ],
)
def test_an_option_changes_what_it_names_and_nothing_else(tmp_path, options, changed):
    found = attacks(run_with(ATTACK, tmp_path=tmp_path), Drill(**options))

    assert found[changed.get("kind", "scale")] == AttackConfig(**AS_WRITTEN | changed)


def test_what_another_kind_cannot_do_is_refused_and_not_dropped(tmp_path):
    with pytest.raises(ConfigError, match=r"attack.direction: 'skipped_update' has none to choose"):
        drill_scenes(run_with(ATTACK, tmp_path=tmp_path), Drill(kinds=("skipped_update",)))


def test_a_run_file_without_an_attack_has_the_papers_two_from_a_quarter_on(tmp_path):
    found = attacks(run_with("[attack]\nseed = 9\n", tmp_path=tmp_path), Drill(steps=16))

    assert list(found) == ["none", "forward_sign_flip", "backward_gaussian"]
    assert {(one.from_step, one.seed, one.rate) for name, one in found.items() if name != "none"} == {(4, 9, 1.0)}


TWO = """
[attack]
kind = "gradient_sign"
stages = [1]
from_step = 2
[[attack.also]]
kind = "forward_sign_flip"
stages = [2]
seed = 3
"""


def test_attackers_of_several_kinds_act_in_one_run(tmp_path):
    run = run_with(TWO, tmp_path=tmp_path)
    scene = drill_scenes(run, Drill(rate=0.5))["gradient_sign@1+forward_sign_flip@2"]

    assert {party: (one.kind, one.rate, one.from_step) for party, one in scene.liars.items()} == {
        "worker-1": ("gradient_sign", 0.5, 2),
        "worker-2": ("forward_sign_flip", 0.5, 0),
    }
    assert scene.run.attack.single_attacks[1].seed == 3


def test_attackers_are_put_together_on_the_command_line(tmp_path):
    drill = Drill(together=("scale:stages=[1]:strength=3:direction=forward", "framing:stages=[2]:from_step=6"))
    scenes = drill_scenes(run_with("", tmp_path=tmp_path), drill)

    assert list(scenes) == ["none", "scale@1+framing@2"]
    liars = scenes["scale@1+framing@2"].liars
    assert (liars["worker-1"].strength, liars["worker-1"].direction, liars["worker-1"].from_step) == (3, "forward", 4)
    assert (liars["worker-2"].kind, liars["worker-2"].from_step) == ("framing", 6)


@pytest.mark.parametrize(
    ("together", "message"),
    [
        (("scale:stages=[1]", "framing:stages=[1]"), r"stages \[1\] are in two attacks"),
        (("scale:size=3",), "size"),
        (("scale:strength",), "expected section.key=value"),
        (("scal",), "'scal'; choices"),
        (("scale:from_step=99",), "nobody lies before step 99"),
        (("none",), "is no attack"),
    ],
)
def test_attackers_that_cannot_be_are_refused(tmp_path, together, message):
    with pytest.raises(ConfigError, match=message):
        drill_scenes(run_with("", tmp_path=tmp_path), Drill(together=together))


REMOTE = "remote_workers = ['north', 'south']\npki = 'keys'\n"


def test_whoever_starts_remote_liars_is_told_how_and_what_their_plan_holds(tmp_path):
    run = run_with(REMOTE, tmp_path=tmp_path)
    scenes = drill_scenes(run, Drill(together=("scale:stages=[2]:strength=3", "framing:stages=[1]")))
    scene = scenes["scale@2+framing@1"]

    how, _, plan = scene.start_instructions().partition("\n")

    assert scenes["none"].start_instructions() == (
        "start every worker of the run with `phalanx join TOKEN --stay`, which serves run after run, or anew with "
        "`phalanx worker`; nobody attacks"
    )
    assert "north, south with `python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml`" in how
    told = AttackPlan.model_validate_json(json.dumps(tomllib.loads(plan))).attackers
    assert told["south"] == AttackConfig(kind="scale", strength=3, from_step=4, stages=(2,))
    assert (told["north"].kind, told["north"].also) == ("framing", ())
    # the owner's own run knows of no attack
    assert scene.run.attack.kind == "none"
    assert scene.planned_steps == list(range(4, 16))


def test_what_is_found_of_remote_liars_is_compared_with_what_they_were_told(tmp_path):
    run = run_with(REMOTE, tmp_path=tmp_path)
    scene = drill_scenes(run, Drill(kinds=("sign_flip",)))["sign_flip"]
    verdicts = [{"party": "north", "step": 6, "offence": "message"}]
    summary = CLEAN | {"attacked_steps": None, "false_accusations": None, "evicted": ["north"], "verdicts": verdicts}

    caught = {"attack": "sign_flip", **drill_row(scene, summary, CLEAN)}

    assert (caught["detected"], caught["steps_to_detection"], caught["planned_steps"]) == (True, 2, 12)
    assert (caught["attacked_steps"], caught["false_accusations"]) == (None, 0)
    assert has_guard_held(caught)
    innocent = [*verdicts, {"party": "south", "step": 7, "offence": "message"}]
    assert not has_guard_held({"attack": "sign_flip", **drill_row(scene, summary | {"verdicts": innocent}, CLEAN)})
    assert not has_guard_held(
        {"attack": "sign_flip", **drill_row(scene, summary | {"evicted": [], "verdicts": []}, CLEAN)}
    )


def test_of_two_kinds_of_liars_both_must_be_found():
    two = DrillRun(tiny_run(), {"worker-1": LIAR, "worker-2": AttackConfig(kind="framing", stages=(2,))})

    assert drill_row(two, CAUGHT, CLEAN)["detected"] is False
    assert drill_row(two, CAUGHT | {"evicted": ["worker-2", "worker-1"]}, CLEAN)["detected"] is True


def test_a_remote_drill_outside_the_middle_stages_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="only the middle stages"):
        drill_scenes(run_with(REMOTE, tmp_path=tmp_path), Drill(stages=(3,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[attack]\nkind = 'zero'\n[[attack.also]]\nkind = 'inf'\n", r"stages \[1\] are in two attacks"),
        ("[attack]\nkind = 'zero'\n[[attack.also]]\nstages = [2]\n", 'a kind other than "none"'),
        ("[attack]\nkind = 'none'\n[[attack.also]]\nkind = 'inf'\nstages = [2]\n", 'a kind other than "none"'),
        ("[attack]\nkind = 'zero'\n[[attack.also]]\nkind = 'inf'\nstages = [3]\n", r"\[3\]: only workers can attack"),
    ],
)
def test_attackers_in_a_run_file_that_cannot_be_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        run_with(text, tmp_path=tmp_path)


def test_a_list_of_attacks_is_kept_and_read_again_as_it_was(tmp_path):
    run = run_with(TWO, tmp_path=tmp_path)
    kept = tmp_path / "config.toml"
    kept.write_text(dump_toml(run))

    assert digest_config(load_run(kept)) == digest_config(run)
    assert [one.kind for one in run.attack.single_attacks] == ["gradient_sign", "forward_sign_flip"]


@pytest.mark.parametrize(
    ("drill", "message"),
    [
        (Drill(kinds=["sine_flip"]), "'sine_flip'; choices: none, adaptive"),
        (Drill(stages=[3]), "only workers can attack"),
        (Drill(steps=4, from_step=4), "nobody lies before step 4; raise --steps"),
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
    assert has_guard_held(row())
    assert not has_guard_held(row(**changes))


def test_who_was_replaced_for_silence_is_caught_and_not_blamed():
    found = row(evicted=[], verdicts=[], lost=["worker-1"])

    assert (found["detected"], found["blamed"], found["steps_to_detection"]) == (True, [], None)
    assert has_guard_held(found)


def test_other_weights_are_seen():
    assert row(final_weights_digest="poisoned")["bit_identical"] is False
    assert row(final_weights_digest=None)["bit_identical"] is None


def test_the_list_says_what_each_attack_does():
    listed = {line["attack"]: line for line in list_attacks()}

    assert listed.keys() == ATTACKS.keys()
    assert all(line["what it does"] and line["caught by"] for line in listed.values())
