"""Post-training under a clock: both sides are given the same rows, and what was not measured is null."""

import io
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from phalanx.errors import ConfigError, TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.posttrain.arm import PosttrainSpec, serve
from phalanx.lab.bench.posttrain.posttrain import (
    GUARDED,
    OURS,
    PEERS,
    TRL,
    UNGUARDED,
    measure_posttrain,
    posttrain_rows,
)
from phalanx.lab.bench.posttrain.rows import PADDING, PosttrainPlan, write_rows
from phalanx.objectives import IGNORE

TINY = PosttrainPlan(layers=4, width=32, vocab_size=320, length=16, batch_size=8, steps=1, turns=1)


class Measured:
    """What rows are made of."""

    def __init__(self, cpu_s, losses=(2.0, 1.0)):
        self.cpu_s, self.losses, self.version = cpu_s, list(losses), "1.0"
        self.wall_s = [2.0 * one for one in cpu_s]


@pytest.fixture
def made(tmp_path):
    """Writes the rows of an objective and returns its spec."""

    def make(objective):
        source = TINY.open_plan_model(tmp_path / "model")
        write_rows(TINY, objective, source, tmp_path / objective)
        return PosttrainSpec(
            objective=objective,
            model=str(source.directory),
            rehearsal=str(TINY.open_plan_model(tmp_path / "rehearsal", smallest=True).directory),
            rows=str(tmp_path / objective),
            batch_size=TINY.batch_size,
            length=TINY.length,
            directory=str(tmp_path),
        )

    return make


def said(spec, *orders):
    answers = io.StringIO()
    serve(spec, [json.dumps(order) for order in orders], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.mark.parametrize(("objective", "first"), [("sft", math.log(320)), ("dpo", math.log(2))])
def test_one_process_learns_the_rows_and_its_first_loss_is_that_of_knowing_nothing(made, objective, first):
    ready, report = said(made(objective), {"steps": 2})

    assert ready["version"] == "phalanx"
    # a model of which pairs are judged beside itself has no opinion
    assert report["losses"][0] == pytest.approx(first, abs=1e-6 if objective == "dpo" else 0.2)
    assert len(set(report["losses"])) == 2


def test_an_order_that_is_none_is_refused(made):
    with pytest.raises(ConfigError, match="TurnRequest"):
        said(made("sft"), {"step": 2})


def test_labels_are_answers_alone_and_the_rows_of_a_pair_have_one_prompt(made):
    rows = load_file(made("dpo").rows)

    for ids, labels, prompt, length in zip(
        rows["ids"], rows["labels"], rows["prompts"].tolist(), rows["lengths"].tolist(), strict=True
    ):
        assert labels[prompt - 1 : length - 1].equal(ids[prompt:length])
        assert int((labels != IGNORE).sum()) == length - prompt
        assert set(ids[length:].tolist()) <= {PADDING}
    for left, right, prompt in zip(rows["ids"][0::2], rows["ids"][1::2], rows["prompts"][0::2].tolist(), strict=True):
        assert left[:prompt].equal(right[:prompt])
        assert not left.equal(right)
    assert torch.isfinite(rows["reference"]).all()


def test_ratios_are_of_turns_side_by_side():
    arms = {OURS: Measured([1.0, 2.0]), TRL: Measured([1.5, 3.0]), UNGUARDED: Measured([2.0, 4.0])}
    arms[GUARDED] = Measured([2.5, 5.0])

    ours, peer, _, guarded = posttrain_rows("sft", arms, {OURS: 60, TRL: 80}, [30, 30])

    assert (ours["tokens_per_cpu_s"], ours["tokens_per_s"]) == (20.0, 10.0)
    assert (peer["speed_of_phalanx"], peer["memory_of_phalanx"]) == (1.5, 0.75)
    assert guarded["extra_over_unguarded"] == 0.25


@pytest.mark.parametrize("objective", PEERS)
def test_without_a_peer_its_figures_are_null(objective):
    arms = {name: Measured([1.0]) for name in (OURS, UNGUARDED, GUARDED)}

    rows = {row["arm"]: row for row in posttrain_rows(objective, arms, {OURS: 60}, [30])}

    assert set(rows) == {OURS, *PEERS[objective], UNGUARDED, GUARDED}
    for name in PEERS[objective]:
        assert {value for key, value in rows[name].items() if key not in ("objective", "arm")} == {None}
    assert rows[GUARDED]["peak_memory_bytes"] is None


def test_differences_are_of_the_worst_step_and_relative_to_our_loss():
    arms = {name: Measured([1.0]) for name in (OURS, UNGUARDED, GUARDED)}
    arms[TRL] = Measured([1.0], (2.0004, 0.9997))

    peer = posttrain_rows("sft", arms, {}, [30])[1]

    assert peer["max_loss_diff"] == pytest.approx(4e-4)
    assert peer["max_rel_loss_diff"] == pytest.approx(3e-4)


def test_rows_have_the_keys_and_arms_that_scripts_read():
    arms = {name: Measured([1.0]) for name in (OURS, TRL, UNGUARDED, GUARDED)}

    rows = posttrain_rows("sft", arms, {}, [30])

    assert {"ours", "ours_guarded", "trl"} <= {row["arm"] for row in rows}
    for row in rows:
        assert {"objective", "arm", "tokens_per_s", "peak_memory_bytes", "max_rel_loss_diff"} <= row.keys()


def test_sides_that_do_not_learn_the_same_are_not_compared():
    arms = {name: Measured([1.0]) for name in (OURS, UNGUARDED, GUARDED)}
    arms[TRL] = Measured([1.0], (2.0, 1.1))

    with pytest.raises(TrainingError, match="trl learns something else"):
        posttrain_rows("sft", arms, {}, [30])


@pytest.mark.slow
def test_all_arms_of_both_objectives_take_turns():
    result = measure_posttrain(TINY, None)

    rows = {(row["objective"], row["arm"]): row for row in result["rows"]}
    for objective, peers in PEERS.items():
        assert all(rows[objective, name]["tokens_per_cpu_s"] is None for name in peers)
        assert rows[objective, OURS]["tokens_per_cpu_s"] > 0
        assert rows[objective, OURS]["peak_memory_bytes"] > 0
        assert rows[objective, GUARDED]["extra_over_unguarded"] is not None
        assert rows[objective, GUARDED]["max_rel_loss_diff"] < 1e-5
    assert "posttrain" in BENCHES
