"""Every objective of pre-training on several ranks: what is learned is what one process learns, weight by weight."""

import pytest

from kept_states import DIVIDED, assert_same_first_step_of_adamw, assert_same_weights, kept_state
from phalanx.objectives import OBJECTIVES
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

STEPS = 6
SENTINELS = [f"<extra_id_{n}>" for n in range(8)]
TOKENS = ["[MASK]", *SENTINELS, "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
KINDS = [kind for kind, one in OBJECTIVES.items() if one.rewriting is not None]
SETTINGS = {"denoisers": '{ kind = "denoisers", tasks = [{ kind = "span_corruption" }, { kind = "prefix_lm" }] }'}
# adamw makes a step of its learning rate of a gradient that is nothing but rounding: see the last test
SGD = ("optimizer.kind='sgd'", "optimizer.lr=0.1", "optimizer.weight_decay=0.0")


@pytest.fixture
def learn(quietly, tmp_path):
    """Train on some ranks; losses and weights."""

    def run(layout, kind, *overrides):
        file, directory = tmp_path / f"{layout}.toml", tmp_path / layout
        text = tiny_run_file(f"[parallel]\n{layout}\n[checkpoint]\nevery = 1\nkeep = {STEPS}\n")
        text = text.replace("vocab_size = 300 }", f"vocab_size = 300, special_tokens = {TOKENS} }}")
        file.write_text(text.replace("[train]\n", f"[train]\nobjective = {SETTINGS.get(kind, repr(kind))}\n"))
        summary = quietly(load_run(file, overrides), directory)
        assert summary["status"] == "completed", summary["shown"]
        losses = [line["loss"] for line in read_metrics(directory / "metrics.jsonl")]
        return losses, kept_state(directory, 1), kept_state(directory, STEPS)

    return run


LAYOUTS = [
    # each objective quickly on one layout, the others among the slow tests
    pytest.param(kind, layout, marks=() if at % 2 == number and at < 2 else pytest.mark.slow)
    for at, kind in enumerate(KINDS)
    for number, layout in enumerate(("dp = 2", "pp = 2"))
]


@pytest.mark.quick_cases("denoisers-*")
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_ranks_learn_what_one_process_learns(learn, kind, layout):
    losses, _, expected = learn("dp = 1", kind, *SGD)

    found, _, weights = learn(layout, kind, *SGD)

    assert found == pytest.approx(losses, rel=1e-6)
    assert losses[-1] != losses[0]
    assert_same_weights(weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp = 2", "pp = 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_under_adamw_ranks_have_the_gradient_of_one_process_and_its_weights_but_for_divided_rounding(
    learn, kind, layout
):
    losses, first, last = learn("dp = 1", kind)

    found, first_of_ranks, last_of_ranks = learn(layout, kind)

    assert found == pytest.approx(losses, rel=1e-6)
    assert_same_first_step_of_adamw(first_of_ranks, first)
    assert_same_weights(last_of_ranks, last, DIVIDED)
