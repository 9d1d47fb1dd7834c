"""Layers are cut into stages anew between two steps: a resumed run has other stages, and tensors keep their bits."""

import json
import shutil

import pytest
import torch

from phalanx.errors import PhalanxError
from phalanx.train import PastRun, train
from phalanx.train.records.proof import verify_run
from phalanx.train.sessions import hooks

CUTS = pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["pipeline.stages=1"], id="one process"),
        pytest.param(["pipeline.stages=3", "pipeline.layers=[1, 2, 1]"], id="a worker comes"),
        pytest.param(["pipeline.stages=4"], id="two workers come", marks=pytest.mark.slow),
    ],
)


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


@pytest.fixture
def stop_run(make_run, quietly, tmp_path, monkeypatch):
    """Train until a step is done, and leave the directory as Ctrl-C does."""
    save = hooks.RunHooks.save_if_due

    def stop_at(step, *overrides):
        def stop(self, at):
            if at == step:
                raise KeyboardInterrupt
            save(self, at)

        with monkeypatch.context() as patch:
            patch.setattr(hooks.RunHooks, "save_if_due", stop)
            quietly(make_run(*overrides), tmp_path / "run")
        return tmp_path / "run"

    return stop_at


@pytest.mark.quick_cases("one?process")
@CUTS
def test_a_resumed_run_has_the_bits_of_one_that_had_the_new_cut_from_there(
    stop_run, make_run, quietly, tmp_path, overrides
):
    path = stop_run(5)
    shutil.copytree(path, tmp_path / "old", symlinks=True)

    summary = quietly(make_run(*overrides), path, resume=True)
    anew = quietly(make_run(*overrides), tmp_path / "anew", from_run=tmp_path / "old")

    assert (summary["status"], summary["resumed_from"], summary["steps"]) == ("completed", 4, 6)
    assert summary["final_weights_digest"] == anew["final_weights_digest"]
    past, theirs = PastRun(path), PastRun(tmp_path / "anew").open_verified(6)
    # the last checkpoint has the new stages, with the moments of the other run; the one before has the old ones
    assert [len(past.open_verified(step).stages) for step in (4, 6)] == [2, int(overrides[0][-1])]
    after = past.open_verified(6)
    names = after.stages_by_tensor()
    assert names == theirs.stages_by_tensor()
    assert all(torch.equal(after.read_tensor(name), theirs.read_tensor(name)) for name in names)
    (told,) = events(path, "config_changed")
    assert told["keys"]["pipeline.stages"] == [2, int(overrides[0][-1])]
    assert "From step 4 on, the layers are cut into stages anew" in summary["shown"]
    assert verify_run(path).steps == 6


def test_the_owner_s_keys_are_never_made_anew(stop_run, make_run):
    path = stop_run(5)
    certificate = path / "pki" / "owner" / "certificate.pem"
    certificate.rename(path / "moved.pem")
    keys = {file.name: file.read_bytes() for file in certificate.parent.iterdir()}

    with pytest.raises(PhalanxError, match=r"certificate\.pem"):
        train(make_run("pipeline.stages=1"), path, resume=True)

    assert {file.name: file.read_bytes() for file in certificate.parent.iterdir()} == keys


@pytest.mark.slow
def test_a_liar_of_the_new_cut_is_named_and_undone(stop_run, make_run, quietly, tmp_path):
    lie = ["attack.kind='sign_flip'", "attack.stages=[1]", "attack.from_step=6", "train.steps=9"]
    path = stop_run(5, "pipeline.stages=3", *lie)
    cut = ["pipeline.stages=4", "pipeline.respawns=1"]
    shutil.copytree(path, tmp_path / "old", symlinks=True)

    summary = quietly(make_run(*cut, *lie), path, resume=True)
    honest = quietly(make_run(*cut, "train.steps=9"), tmp_path / "honest", from_run=tmp_path / "old")

    assert (summary["evicted"], summary["false_accusations"]) == (["worker-1"], 0)
    assert summary["final_weights_digest"] == honest["final_weights_digest"]
    assert verify_run(path).steps == 9


@pytest.mark.slow
def test_what_processes_kept_of_the_old_cut_is_gone_on_from(stop_run, make_run, quietly, tmp_path):
    no_checkpoint = ["checkpoint.journal=true", "checkpoint.every=0"]
    path = stop_run(5, "pipeline.stages=3", *no_checkpoint)

    summary = quietly(make_run("pipeline.stages=4", *no_checkpoint), path, resume=True)

    assert (summary["status"], summary["resumed_from"]) == ("completed", 4)
    assert "journal: the run continues where it ended, at step 4" in summary["shown"]
    assert len(PastRun(path).open_verified(4).stages) == 3
