"""Every arm of the table trains a tiny model to its end and leaves the same kind of row."""

import json

import pytest

from phalanx.data import BpeConfig, DataConfig, PythonManualConfig, prepare_corpus
from phalanx.lab.reproduce.arms import ARMS, HONEST
from phalanx.lab.reproduce.cell import TableCell, train_cell
from phalanx.lab.reproduce.workload import steps_per_epoch
from phalanx.pipeline import PipelineConfig
from phalanx.testing import tiny_run

EPOCHS = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    config = DataConfig(
        sources=(PythonManualConfig(),),
        tokenizer=BpeConfig(vocab_size=300),
        sequence_length=8,
        validation_share=0.4,
        max_documents=3,
        max_validation_sequences=8,
    )
    return prepare_corpus(config, tmp_path_factory.mktemp("data"), 1)


@pytest.fixture(scope="module")
def rows(corpus, tmp_path_factory):
    """Train each arm when it is first asked for."""
    cache, known = tmp_path_factory.mktemp("cache"), {}
    tiny = tiny_run(pipeline=PipelineConfig(stages=6, step_timeout_s=30.0))
    steps = min(EPOCHS * steps_per_epoch(corpus), 6)
    run = tiny.model_copy(
        update={
            "model": tiny.model.model_copy(update={"architecture": tiny.model.architecture | {"vocab_size": 300}}),
            "train": tiny.train.model_copy(update={"steps": steps}),
        }
    )

    def row(arm):
        if arm not in known:
            attack = (None, None) if arm in HONEST else ("forward", 0.5)
            known[arm] = train_cell(TableCell("gpt2", "manual", "plain", 0, arm, *attack), run, corpus, cache)
        return known[arm]

    return row


@pytest.mark.quick_cases("phalanx", "restart", "skip_layer", "attacked", "oracle_drop", "clean")
@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=pytest.mark.slow if arm == "statistics" else ()) for arm in ARMS]
)
def test_every_arm_leaves_a_whole_row(rows, arm):
    row = rows(arm)

    assert row["status"] == "completed"
    assert 1.0 < row["perplexity_best"] < 1000.0
    assert set(row) == set(rows("clean"))
    assert (row["lies"] > 0) == (arm in {"attacked", "restart", "skip_layer", "statistics", "phalanx"})
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("arm", ["restart", "phalanx", "phalanx_no_attacker"])
def test_arms_that_lose_nothing_end_with_the_clean_bits(rows, arm):
    assert rows(arm)["weights_digest"] == rows("clean")["weights_digest"]
    assert rows(arm)["perplexity_last"] == rows("clean")["perplexity_last"]


@pytest.mark.parametrize("arm", ["attacked", "oracle_drop", "skip_layer"])
def test_arms_that_lose_something_end_elsewhere(rows, arm):
    assert rows(arm)["weights_digest"] != rows("clean")["weights_digest"]


def test_the_real_guard_excludes_the_guilty_and_nobody_else(rows):
    row = rows("phalanx")

    assert 0 < len(row["evicted"]) <= 4
    assert (row["honest_accused"], row["lies_missed"], row["dropped_steps"]) == (0, 0, 0)
    assert row["attacked_steps"] == row["redone_steps"] == len(row["evicted"])
