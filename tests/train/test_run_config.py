"""A run that cannot work is refused before anything is started, by one error that says what to change."""

import pytest

from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.batch_size=9"], ["batch_size = 9", "microbatches = 4", "multiple"]),
        (["train.steps=0"], ["train.steps"]),
        (["train.stepz=3"], ["stepz", "steps"]),
        (["train.device='tpu'"], ["train.device"]),
        (["optimizer.warmup_steps=6"], ["warmup_steps = 6", "train.steps = 6"]),
        (["attack.kind='forward_sign_flip'", "pipeline.stages=4", "attack.stages=[0]"], ["attack.stages", "[1, 2]"]),
        (["attack.kind='forward_sign_flip'", "pipeline.stages=4", "attack.stages=[3]"], ["attack.stages", "owner"]),
        (["attack.kind='forward_sign_flip'", "pipeline.stages=2"], ["attack.stages"]),
        (["attack.kind='forward_sign_flip'", "pipeline.stages=4", "attack.stages=[]"], ["attack.stages", "empty"]),
        (["pipeline.layers=[1,1,1]"], ["layers", "stages = 2"]),
        (["pipeline.schedule='zigzag'"], ["pipeline.schedule", "1f1b"]),
        (["pipeline.stages=3", "pipeline.remote_workers=['a']"], ["remote_workers", "pki"]),
        (["pipeline.stages=4", "pipeline.may_join=['a']", "pipeline.pki='x'"], ["may_join", "remote_workers"]),
        (["pipeline.stages=3", "pipeline.remote_workers=['owner']", "pipeline.pki='x'"], ["owner"]),
        (["guard.audit_rate=0"], ["guard.audit_rate"]),
        (["guard.mode='maybe'"], ["guard.mode", "phalanx"]),
        (["pipeline.stages=4", "pipeline.layout={dp=2}"], ["worker-1 several ranks", 'guard.classes = "mixed"']),
        (
            ["pipeline.stages=4", "pipeline.layout={dp=2}", "guard.classes='mixed'", "model.adapter={dropout=0.1}"],
            ["pipeline.layout gives worker-1 several ranks: model.adapter.dropout = 0.1", "set it to 0"],
        ),
        (["pipeline.stages=4", "pipeline.layouts={worker-3={dp=2}}"], ["layouts has 'worker-3'", "worker-1, worker-2"]),
        (
            ["pipeline.stages=4", "pipeline.layout={pp=2}"],
            ["pp is not allowed for the ranks of one party", "pipeline.stages"],
        ),
        (
            ["pipeline.stages=3", "pipeline.remote_workers=['a']", "pipeline.pki='x'", "pipeline.layout={dp=2}"],
            ["layout and layouts apply to local workers", "[parallel]"],
        ),
        (["model.adapter={rank=4,targets=['']}"], ["model.adapter", "targets"]),
        (["guard.shadow='adapters'"], ["guard.shadow", "adapters", "model.adapter"]),
        (["checkpoint.encrypt=true"], ["checkpoint", "encrypt = true and key belong together"]),
        (["nothing.here=1"], ["nothing"]),
    ],
)
def test_an_impossible_combination_is_named(make_run, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        make_run(*overrides)

    assert [word for word in named if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["pipeline.stages=5"], ["5 stages", "4"]),
        (["data.sequence_length=17"], ["sequence_length = 17", "16"]),
        (["model.architecture.vocab_size=280"], ["vocab_size", "300", "280"]),
        (["pipeline.layers=[1,1]"], ["[1, 1]", "4"]),
        (["data.tokenizer={kind='model'}"], ["tokenizer"]),
    ],
)
def test_what_shows_only_with_the_model_is_named_too(make_run, quietly, tmp_path, overrides, named):
    with pytest.raises(Exception) as refusal:
        quietly(make_run(*overrides), tmp_path / "run")

    assert type(refusal.value).__module__ == "phalanx.errors"
    assert [word for word in named if word not in str(refusal.value)] == []


def test_a_run_is_called_like_its_file(make_run):
    assert make_run().name == "tiny"
