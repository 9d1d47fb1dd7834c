"""Every objective of pre-training on several ranks: what is learned is what one process learns, weight by weight."""

import pytest
import torch

from phalanx.checkpoint import open_checkpoint
from phalanx.objectives import OBJECTIVES
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

STEPS = 6
SENTINELS = [f"<extra_id_{n}>" for n in range(8)]
TOKENS = ["[MASK]", *SENTINELS, "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
KINDS = [kind for kind, one in OBJECTIVES.items() if one.rewriting is not None]
SETTINGS = {"denoisers": '{ kind = "denoisers", tasks = [{ kind = "span_corruption" }, { kind = "prefix_lm" }] }'}
WITHIN = {"rtol": 1e-6, "atol": 1e-6}
# adamw makes a step of its learning rate of a gradient that is nothing but rounding, see the last test
SGD = ("optimizer.kind='sgd'", "optimizer.lr=0.1", "optimizer.weight_decay=0.0")


@pytest.fixture
def learn(quietly, tmp_path):
    """Train on some ranks; losses and weights."""

    def run(layout, kind, *overrides):
        file, directory = tmp_path / f"{layout}.toml", tmp_path / layout
        text = tiny_run_file(f"[parallel]\n{layout}\n[checkpoint]\nevery = {STEPS}\n")
        text = text.replace("vocab_size = 300 }", f"vocab_size = 300, special_tokens = {TOKENS} }}")
        file.write_text(text.replace("[train]\n", f"[train]\nobjective = {SETTINGS.get(kind, repr(kind))}\n"))
        summary = quietly(load_run(file, overrides), directory)
        assert summary["status"] == "completed", summary["shown"]
        owner = load_identity(directory / "pki" / "owner").public
        path = directory / "checkpoints" / f"step-{STEPS:08}"
        checkpoint = open_checkpoint(path, owner, run=None, config_digest=None)
        weights = {
            name: tensor
            for stage in checkpoint.stages
            for name, tensor in checkpoint.tensors(stage).items()
            if name.startswith("weight/")
        }
        return [line["loss"] for line in read_metrics(directory / "metrics.jsonl")], weights

    return run


LAYOUTS = [
    # each objective quickly on one layout, the others among the slow tests
    pytest.param(kind, layout, marks=() if at % 2 == number and at < 2 else pytest.mark.slow)
    for at, kind in enumerate(KINDS)
    for number, layout in enumerate(("dp = 2", "pp = 2"))
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_ranks_learn_what_one_process_learns(learn, kind, layout):
    losses, expected = learn("dp = 1", kind, *SGD)

    found, weights = learn(layout, kind, *SGD)

    assert found == pytest.approx(losses, rel=1e-6)
    assert losses[-1] != losses[0]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, **WITHIN, msg=lambda said, name=name: f"{name}: {said}")
