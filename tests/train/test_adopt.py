"""A run that goes on where another one is, cut into other stages; and its weights un-sliced, in the hub's layout."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.cli import run_command as command_line
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import weights_digest
from phalanx.optimizers import learning_rate
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, train
from phalanx.train.sessions import hooks


@pytest.fixture(scope="session")
def stopped_once():
    """Directories of runs that were stopped, by their overrides; not to be changed."""
    return {}


@pytest.fixture
def stopped(make_run, quietly, tmp_path, tmp_path_factory, monkeypatch, stopped_once):
    """A copy of a run in two stages that was stopped after its checkpoint of step 4."""
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 5:
            raise KeyboardInterrupt
        save(self, at)

    def start(*overrides):
        if overrides not in stopped_once:
            home = tmp_path_factory.mktemp("stopped") / "run"
            with monkeypatch.context() as patch:
                patch.setattr(hooks.RunHooks, "save_if_due", stop)
                quietly(make_run(*overrides), home)
            stopped_once[overrides] = home
        shutil.copytree(stopped_once[overrides], tmp_path / "old", symlinks=True)
        return tmp_path / "old"

    return start


def test_a_run_is_trained_longer_where_another_one_ended(make_run, quietly, trained_once, tmp_path):
    shorter, old = trained_once
    before = tensors(PastRun(old).open_verified())

    summary = quietly(make_run("train.steps=9", "checkpoint.keep=9"), tmp_path / "new", from_run=old)

    assert (shorter["steps"], summary["resumed_from"], summary["steps"]) == (6, 6, 9)
    assert "train.steps: 6 -> 9. Steps before 6 stay unchanged." in summary["shown"]
    past = PastRun(tmp_path / "new")
    after = tensors(past.open_verified(6))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    events = [json.loads(line) for line in (tmp_path / "new" / "events.jsonl").read_text().splitlines()]
    (adopted,) = [event["body"] for event in events if event["kind"] == "adopted"]
    assert adopted["train_steps"] == [6, 9]
    rows = {row["step"]: row for row in read_metrics(tmp_path / "new" / "metrics.jsonl")}
    settings = make_run("train.steps=9").optimizer
    assert [rows[step]["lr"] for step in (6, 7, 8)] == [learning_rate(settings, step, 9) for step in (6, 7, 8)]
    again = quietly(make_run("train.steps=9", "checkpoint.keep=9"), tmp_path / "new", resume=True)
    assert again["final_weights_digest"] == summary["final_weights_digest"]


@pytest.mark.slow
def test_a_run_that_was_to_be_longer_from_the_start_learns_the_same_where_the_rate_does_not_decay(
    make_run, quietly, tmp_path
):
    constant = "optimizer.schedule=constant"
    quietly(make_run(constant), tmp_path / "short")
    longer = quietly(make_run(constant, "train.steps=8"), tmp_path / "longer", from_run=tmp_path / "short")
    whole = quietly(make_run(constant, "train.steps=8"), tmp_path / "whole")

    assert longer["final_weights_digest"] == whole["final_weights_digest"]


def test_resuming_with_other_keys_names_them_and_the_way_to_train_on(make_run, trained_once):
    with pytest.raises(ConfigError) as refusal:
        train(make_run("train.microbatches=2", "optimizer.warmup_steps=1"), trained_once[1], resume=True)

    said = str(refusal.value)
    assert "optimizer.warmup_steps (0 there, 1 here), train.microbatches (4 there, 2 here);" in said
    assert f"--from {trained_once[1]} with another --run-dir" in said


def tensors(checkpoint):
    return {name: checkpoint.read_tensor(name) for name in sorted(checkpoint.stages_by_tensor())}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["pipeline.stages=1"], id="un-sliced"),
        pytest.param(["pipeline.stages=4"], id="four", marks=pytest.mark.slow),
        pytest.param(
            ["pipeline.stages=3", "guard.mode='off'", "train.microbatches=2"], id="unguarded", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_goes_on_in_other_stages_with_every_bit_that_it_had(
    make_run, quietly, trained_once, stopped, tmp_path, overrides
):
    before = tensors(PastRun(stopped()).open_verified())

    summary = quietly(make_run(*overrides, "checkpoint.keep=9"), tmp_path / "new", from_run=tmp_path / "old")

    past = PastRun(tmp_path / "new")
    first = past.open_verified(4)
    assert len(first.stages) == int(overrides[0][-1])
    after = tensors(first)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    assert (summary["status"], summary["resumed_from"], summary["steps"]) == ("completed", 4, 6)
    assert [line["step"] for line in read_metrics(tmp_path / "new" / "metrics.jsonl")] == [4, 5]
    # norms are summed by stage, and gradients by microbatch: the order of sums is all that differs
    assert summary["loss_last"] == pytest.approx(trained_once[0]["loss_last"], rel=1e-5)
    assert summary["false_accusations"] == 0


def test_adapters_go_on_in_other_stages_and_hold_no_frozen_weight(make_run, quietly, stopped, tmp_path):
    adapter = "model.adapter={rank=2}"
    old = PastRun(stopped(adapter)).open_verified()

    quietly(make_run(adapter, "pipeline.stages=1", "checkpoint.keep=9"), tmp_path / "new", from_run=tmp_path / "old")

    new = PastRun(tmp_path / "new").open_verified(4)
    assert all(".lora_" in name for name in new.stages_by_tensor())
    assert all(old.read_tensor(name).equal(new.read_tensor(name)) for name in old.stages_by_tensor())
    assert old.state["base"] == new.state["base"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.seed=9", "train.seed"),
        ("optimizer.lr=1e-3", "optimizer"),
        ("train.steps=5", "train.steps"),
    ],
)
def test_what_would_be_no_continuation_is_refused_and_leaves_nothing(
    make_run, quietly, stopped, tmp_path, override, named
):
    stopped()

    with pytest.raises(ConfigError, match=f"{named}: (differs from|5 are fewer than the 6 of)"):
        quietly(make_run(override), tmp_path / "new", from_run=tmp_path / "old")

    assert not (tmp_path / "new").exists()


def test_a_rolled_back_run_is_not_gone_on_from(make_run, quietly, stopped, tmp_path):
    shutil.rmtree(stopped() / "checkpoints" / "step-00000004")

    with pytest.raises(CheckpointError, match="rolled back"):
        quietly(make_run(), tmp_path / "new", from_run=tmp_path / "old")

    assert not (tmp_path / "new").exists()


def test_an_adoption_that_was_interrupted_does_not_begin_from_nothing(
    make_run, quietly, stopped, tmp_path, monkeypatch
):
    from phalanx.train.saving import savepoint

    stopped()

    def crash(self, *arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(savepoint.Savepoint, "write_checkpoint", crash)
        quietly(make_run(), tmp_path / "new", from_run=tmp_path / "old")

    with pytest.raises(CheckpointError, match="--from was interrupted"):
        quietly(make_run(), tmp_path / "new", resume=True)


def test_from_another_run_and_resume_exclude_each_other(make_run, quietly, tmp_path):
    with pytest.raises(ConfigError, match="remove one of them"):
        quietly(make_run(), tmp_path / "new", from_run=tmp_path / "old", resume=True)


def test_an_adapter_of_another_base_is_refused(make_run, quietly, stopped, cache, tmp_path):
    home = stopped("model.adapter={rank=2}")
    source_files = [path for path in (cache / "models").rglob("*.safetensors")]
    kept = {path: path.read_bytes() for path in source_files}
    try:
        for path, data in kept.items():
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="foreign: its adapter belongs to a model whose files have digest"):
            quietly(make_run("model.adapter={rank=2}"), home, resume=True)
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


# --- out of the run ------------------------------------------------------------------------------------


def test_transformers_loads_the_exported_weights_bit_for_bit(trained_once, tmp_path, capsys):
    summary, run_dir = trained_once

    assert command_line(["checkpoint", "export", str(run_dir), str(tmp_path / "model")]) == 0

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert model.dtype == torch.float32
    assert weights_digest(model.named_parameters()) == summary["final_weights_digest"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer("def")["input_ids"]
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.architectures == [type(model).__name__]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}
    assert "weights of step 6" in capsys.readouterr().out
    assert command_line(["checkpoint", "export", str(run_dir), str(tmp_path / "model")]) == 3


def test_an_export_is_compared_with_the_digest_that_the_run_signed(trained_once, tmp_path, capsys):
    summary, run_dir = trained_once
    home = tmp_path / "model"
    command_line(["checkpoint", "export", str(run_dir), str(home)])

    assert command_line(["model", "verify", str(home), str(run_dir)]) == 0
    assert summary["final_weights_digest"] in capsys.readouterr().out

    tensors = load_file(home / "model.safetensors")
    name = min(tensors)
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, home / "model.safetensors", {"format": "pt"})
    assert command_line(["model", "verify", str(home), str(run_dir)]) == 5
    assert "they were changed, or belong to another step or run" in capsys.readouterr().err


def test_a_file_for_devices_is_traced_to_its_checkpoint_and_no_other(trained_once, stopped, tmp_path, capsys):
    _, run_dir = trained_once
    other_run, edge = stopped(), tmp_path / "edge"

    assert command_line(["export", str(run_dir), str(edge), "--precision", "f32", "--no-check", "--json"]) == 0
    signer = json.loads(capsys.readouterr().out)["signer"]
    # nobody compared it: that is not called good either
    assert command_line(["model", "verify", str(edge), str(run_dir), "--signer", signer, "--json"]) == 7
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert command_line(["model", "verify", str(edge), str(other_run), "--signer", signer]) == 5
    assert "made from run" in capsys.readouterr().err


def test_a_run_that_has_not_ended_has_no_digest_to_compare_with(stopped, tmp_path, capsys):
    home = stopped()
    command_line(["checkpoint", "export", str(home), str(tmp_path / "model")])

    assert command_line(["model", "verify", str(tmp_path / "model"), str(home)]) == 3
    assert "it has not ended" in capsys.readouterr().err


# peft asks transformers in a way that transformers will drop
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_is_exported_for_peft_or_merged(cache, stopped, tmp_path):
    peft = pytest.importorskip("peft")
    # alpha unlike the rank, so that a forgotten scale shows
    home = stopped("model.adapter={rank=2, alpha=6}")

    assert command_line(["checkpoint", "export", str(home), str(tmp_path / "adapter")]) == 0
    assert command_line(["checkpoint", "export", str(home), str(tmp_path / "merged"), "--merge"]) == 0

    base = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    ids = torch.arange(12).reshape(1, 12)
    assert "/" not in base
    plain = AutoModelForCausalLM.from_pretrained(
        cache / "models" / base, local_files_only=True, dtype=torch.float32
    ).eval()
    untouched = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True).eval()(ids).logits
    assert not torch.allclose(adapted, untouched, atol=1e-4)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "engine", [(), pytest.param(("pipeline.stages=4",), marks=pytest.mark.slow)], ids=["two stages", "with workers"]
)
def test_stages_begin_with_the_adapter_whose_directory_the_run_file_names(make_run, quietly, stopped, tmp_path, engine):
    home = stopped("model.adapter={rank=2, alpha=6}")
    trained = PastRun(home).open_verified(4)
    assert command_line(["checkpoint", "export", str(home), str(tmp_path / "adapter")]) == 0
    named = f"model.adapter={{rank=2, alpha=6, path='{tmp_path / 'adapter'}'}}"

    # a rate that moves no bit: what is kept of the first step is what the run has begun with
    begun = make_run(named, "optimizer.lr=1e-30", "train.steps=1", "checkpoint.every=1", *engine)
    summary = quietly(begun, tmp_path / "new")

    found = PastRun(tmp_path / "new").open_verified(1)
    names = [name for name in trained.stages_by_tensor() if name.startswith("weight/")]
    assert sorted(name for name in found.stages_by_tensor() if name.startswith("weight/")) == sorted(names)
    assert all(found.read_tensor(name).equal(trained.read_tensor(name)) for name in names)
    assert summary["false_accusations"] == 0


def test_a_checkpoint_is_verified_from_outside_and_what_is_wrong_is_named(stopped, capsys):
    home = stopped()

    assert command_line(["checkpoint", "verify", str(home)]) == 0
    assert "signed, complete, unchanged, equal to the audit log's entry" in capsys.readouterr().out
    shard = home / "checkpoints" / "step-00000004" / "stage-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert command_line(["checkpoint", "verify", str(home)]) == 3
    assert "stage-1.safetensors: truncated" in capsys.readouterr().err
    assert command_line(["checkpoint", "verify", str(home), "--step", "2"]) == 0
    assert command_line(["checkpoint", "verify", str(home / "nowhere")]) == 3


def test_keys_are_made_and_changed_on_the_command_line(make_run, quietly, stopped, tmp_path, capsys):
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    assert command_line(["checkpoint", "new-key", str(old)]) == 0
    assert command_line(["checkpoint", "new-key", str(new)]) == 0
    home = stopped("checkpoint.encrypt=true", f"checkpoint.key='file:{old}'")

    assert command_line(["checkpoint", "rotate", str(home), "--to", f"file:{new}"]) == 0

    assert old.read_text().strip() not in capsys.readouterr().out
    assert command_line(["checkpoint", "verify", str(home)]) == 3
    new.replace(old)
    assert command_line(["checkpoint", "verify", str(home)]) == 0


def test_there_is_no_key_to_change_where_nothing_is_encrypted(trained_once):
    assert command_line(["checkpoint", "rotate", str(trained_once[1]), "--to", "env:KEY"]) == 2
