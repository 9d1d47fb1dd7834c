"""Real workers: one lies unseen and is convicted later, and the run says which steps that leaves in doubt."""

import json

import pytest

from phalanx.cli import run_command as command_line
from phalanx.pipeline import AuditDraw
from phalanx.train.sessions import hooks

NO_COIN = ("guard.step_audit_rate=0.0", "guard.owner_audit_rate=0.0", "guard.gradient_screen=false")
NOTHING_KEPT = ("guard.keep_states=0",)
# the made-up weight gradients of step 2 and later pass every check that is left but an audit of the whole step
POISONER = (
    "pipeline.stages=4",
    "checkpoint.keep=9",
    "attack.kind='gradient_sign'",
    "attack.stages=[1]",
    "attack.from_step=2",
    *NO_COIN,
)


@pytest.fixture
def audit_whole(monkeypatch):
    """Let the owner's coin for whole steps fall on these (stage, step) and no others."""

    def choose(*places):
        def whole_step(self, *, step, epoch, stage):
            return (stage, step) in places

        monkeypatch.setattr(AuditDraw, "draws_whole_step", whole_step)

    return choose


def events(run_dir, kind):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event["body"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.slow
def test_lies_that_were_accepted_are_among_the_steps_that_the_summary_names_and_going_back_undoes_them(
    make_run, quietly, audit_whole, tmp_path
):
    audit_whole((1, 0), (1, 1), (1, 4))

    summary = quietly(make_run(*POISONER, *NOTHING_KEPT), tmp_path / "run")

    assert (summary["status"], summary["evicted"], summary["attacked_steps"]) == ("completed", ["worker-1"], [2, 3, 4])
    assert summary["in_doubt"] is True
    (doubt,) = summary["steps_in_doubt"]
    assert doubt == {
        **{"party": "worker-1", "stage": 1, "convicted_in": [4], "steps": [[2, 3]], "num_steps": 2, "last_verified": 1}
    }
    assert summary["checks"]["1"]["whole_step"] == {"steps": 3, "last": 4}
    assert summary["steps_believed"] == {"1": 3, "2": 6}
    assert "IN DOUBT: steps 2 to 3 of stage 1 were computed by worker-1" in summary["shown"]
    assert "--from-step 2 returns to a checkpoint before them" in " ".join(summary["shown"].split())
    assert events(tmp_path / "run", "in_doubt") == [doubt]

    honest = quietly(make_run("pipeline.stages=4", *NO_COIN), tmp_path / "honest")
    assert summary["final_weights_digest"] != honest["final_weights_digest"]
    back = quietly(
        make_run(*POISONER, *NOTHING_KEPT), tmp_path / "run", resume=True, from_step=summary["checkpoint_before_doubt"]
    )

    assert (back["in_doubt"], back["steps_in_doubt"], back["evicted"]) == (False, [], ["worker-1"])
    assert back["final_weights_digest"] == honest["final_weights_digest"]
    assert "IN DOUBT" not in back["shown"]
    assert (honest["in_doubt"], honest["steps_believed"]) == (False, {"1": 3, "2": 6})
    assert command_line(["audit", "verify", str(tmp_path / "run")]) == 0


def test_what_was_accepted_before_a_resume_is_in_doubt_after_a_conviction_that_follows_it(
    make_run, quietly, audit_whole, monkeypatch, tmp_path
):
    audit_whole((1, 0), (1, 5))
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 5:
            raise KeyboardInterrupt
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        first = quietly(make_run(*POISONER, *NOTHING_KEPT), tmp_path / "run")

    summary = quietly(make_run(*POISONER, *NOTHING_KEPT), tmp_path / "run", resume=True)

    assert (first["status"], first["in_doubt"], first["steps_believed"]) == ("interrupted", False, {"1": 4, "2": 5})
    assert (summary["resumed_from"], summary["evicted"]) == (4, ["worker-1"])
    assert [doubt["steps"] for doubt in summary["steps_in_doubt"]] == [[[1, 4]]]
    assert summary["checks"]["1"]["messages"]["steps"] == 6


@pytest.mark.slow
def test_where_states_are_kept_nothing_is_left_in_doubt(make_run, quietly, audit_whole, tmp_path):
    audit_whole((1, 4))

    summary = quietly(make_run(*POISONER, "guard.keep_states=6"), tmp_path / "run")

    assert (summary["evicted"], summary["steps_redone"]) == (["worker-1"], 4)
    assert (summary["in_doubt"], summary["steps_in_doubt"]) == (False, [])
    honest = quietly(make_run("pipeline.stages=4", *NO_COIN), tmp_path / "honest")
    assert summary["final_weights_digest"] == honest["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["economy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("light", "standard", "strict"))]
)
def test_with_every_preset_nothing_is_left_in_doubt(make_run, quietly, audit_whole, tmp_path, preset):
    audit_whole((1, 0), (1, 4))

    summary = quietly(make_run(f"guard.preset='{preset}'", *POISONER), tmp_path / "run")

    assert (summary["evicted"], summary["steps_redone"]) == (["worker-1"], 4)
    assert (summary["in_doubt"], summary["steps_in_doubt"]) == (False, [])
    assert "the run returns from step 4 to step 0" in summary["shown"]
    honest = quietly(make_run("pipeline.stages=4", *NO_COIN), tmp_path / "honest")
    assert summary["final_weights_digest"] == honest["final_weights_digest"]
    assert command_line(["audit", "verify", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_doubtful_one_takes_the_doubt_along(make_run, quietly, audit_whole, tmp_path):
    audit_whole((1, 4))
    old = quietly(make_run(*POISONER, *NOTHING_KEPT), tmp_path / "old")
    assert old["steps_in_doubt"][0]["steps"] == [[0, 3]]

    new = quietly(make_run("pipeline.stages=3", *NO_COIN), tmp_path / "new", from_run=tmp_path / "old")

    (doubt,) = new["steps_in_doubt"]
    assert doubt["party"].endswith("/worker-1")
    assert (doubt["stage"], doubt["steps"], new["in_doubt"]) == (1, [[0, 3]], True)


@pytest.mark.slow
def test_two_attackers_of_unlike_kinds_act_in_one_run_and_both_are_named(make_run, quietly, audit_whole, tmp_path):
    audit_whole((1, 4))
    both = "attack.also=[{kind='forward_sign_flip', stages=[2], from_step=3}]"

    summary = quietly(make_run(*POISONER, both, *NOTHING_KEPT), tmp_path / "run")

    assert sorted(summary["evicted"]) == ["worker-1", "worker-2"]
    assert summary["false_accusations"] == 0
    assert {(doubt["party"], doubt["stage"]) for doubt in summary["steps_in_doubt"]} >= {("worker-1", 1)}
