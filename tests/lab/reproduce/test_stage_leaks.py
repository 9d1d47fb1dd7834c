"""The middle stages of a pipeline: every attack wins on plaintext messages, and gets chance from noise and seals."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.row_file import RowFile
from phalanx.lab.reproduce.stage_leaks import measure_stage_leaks, stage_lines, summarise_stages
from phalanx.lab.reproduce.stage_leaks.lab import (
    TOKEN_ATTACKS,
    AttackedPipeline,
    StageLeakCell,
    attack_pipeline,
)
from phalanx.lab.reproduce.stage_leaks.size import SIZES, PipelineSize
from phalanx.lab.reproduce.stage_leaks.table import noisy_regimes, stage_cells
from phalanx.lab.reproduce.stage_leaks.texts import LeakTexts
from phalanx.lab.reproduce.stage_leaks.trained_pipeline import OwnerNoise, TrainedPipeline, step_inputs_of
from privacy_lab import SEQ, at_most, text, tiny_model

TINY = PipelineSize(
    layers=(1, 1, 1, 1),
    length=SEQ - 1,
    rows=8,
    microbatches=2,
    steps=3,
    rates=MappingProxyType({"scratch": 1e-3, "full": 1e-4, "lora": 1e-3}),
    owned=64,
    held_out=16,
    known=192,
    attacked=32,
    searched=6,
    labelled=32,
    inverter_steps=60,
    search_steps=120,
    candidates=256,
    openings=256,
    widths=(16, 64, 256),
)
HIDING = ("noise", 30.0), ("sealed", 0.0)


def two_kinds(seed):
    common = text(2 * TINY.labelled, seed)
    rare = torch.where(torch.rand(common.shape, generator=torch.Generator().manual_seed(seed)) < 0.5, common, 200)
    return common, rare


@pytest.fixture(scope="session")
def attacked(tmp_path_factory):
    source = tiny_model(tmp_path_factory.mktemp("stage-leaks"))
    texts = LeakTexts(
        text(TINY.owned, seed=1), text(TINY.held_out, seed=2), text(TINY.known, seed=3), {"domain": two_kinds(4)}
    )
    return AttackedPipeline(source, texts, TINY, "lora")


def measure(attacked, guard="plaintext", noise=0.0):
    return attack_pipeline(attacked, StageLeakCell("tiny", attacked.regime, guard, noise, 0))


@pytest.fixture(scope="session")
def plain(attacked):
    return measure(attacked)


def test_plaintext_messages_give_tokens_next_tokens_and_kinds_of_text_away(plain):
    first, second = plain["stages"]

    assert [(line["stage"], line["first_layer"], line["end_layer"]) for line in (first, second)] == [
        (1, 1, 2),
        (2, 2, 3),
    ]
    for line in (first, second):
        assert set(line["tokens"]) == set(TOKEN_ATTACKS)
        assert line["tokens"]["candidate_search"] >= 0.9
        assert line["tokens"]["gradient_search"] >= 0.6 > 4 * line["tokens_chance"]
        assert max(line["labels"].values()) >= 0.3 > 3 * line["labels_chance"]
        assert line["properties"]["domain"] >= 0.8
    # behind one block the learnt maps win as well
    assert min(first["tokens"]["linear_map"], first["tokens"]["trained_inverter"]) >= 0.5


@pytest.mark.parametrize(("guard", "noise"), HIDING)
def test_hidden_messages_give_chance(attacked, guard, noise):
    for line in measure(attacked, guard, noise)["stages"]:
        tokens = at_most(line["tokens_chance"], line["tokens_searched"])
        assert max(share for share in line["tokens"].values() if share is not None) <= tokens
        assert max(line["labels"].values()) <= at_most(line["labels_chance"], line["tokens_tried"])
        tried = line["properties_tried"]["domain"]
        assert guard == "noise" or line["properties"]["domain"] <= at_most(0.5, tried)


def test_a_front_that_nobody_else_has_leaves_the_attacks_that_learn_from_known_pairs(attacked):
    row = measure(replace(attacked, regime="scratch"))

    for line in row["stages"]:
        assert line["tokens"]["candidate_search"] is None
        assert line["tokens"]["linear_map"] > 2 * line["tokens_chance"]
        assert set(line["labels"]) == {"linear_map", "trained_inverter"}
    assert row["loss"] != row["loss_before"]
    assert len(row["stage_cpu_s"]) == 4


def test_noise_is_a_share_of_each_columns_deviation_and_none_is_none():
    sent = torch.randn((64, 32, 4), generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.1, 3.0])

    assert OwnerNoise(0.0, 0).add_noise(sent) is sent
    added = OwnerNoise(0.5, 0).add_noise(sent) - sent
    assert torch.allclose(added.flatten(0, 1).std(dim=0), 0.5 * sent.flatten(0, 1).std(dim=0), rtol=0.1)


def test_only_what_the_owner_sends_is_noised(attacked):
    """The first stage's activations and the last one's gradients: others could leave noise out."""
    rows = text(4, seed=7)
    quiet, loud = (
        TrainedPipeline.build(attacked.source, TINY, "full", OwnerNoise(level, 0), 0).messages_of(rows)
        for level in (0.0, 1.0)
    )

    assert not torch.equal(quiet.activations[1], loud.activations[1])
    assert not torch.equal(quiet.gradients[2], loud.gradients[2])
    assert quiet.activations[1].shape == (4, TINY.length, attacked.source.hidden_size)


def test_rows_become_inputs_and_next_tokens():
    inputs = step_inputs_of(torch.tensor([[1, 2, 3], [4, 5, 6]]), 2)

    assert [part.tolist() for part in inputs.ids] == [[[1, 2]], [[4, 5]]]
    assert [part.tolist() for part in inputs.labels] == [[[2, 3]], [[5, 6]]]
    assert inputs.num_targets == 4


def test_the_summary_has_a_line_for_each_stage_of_each_guard(plain):
    rows = [{**vars(StageLeakCell("tiny", "lora", "plaintext", 0.0, seed)), **plain} for seed in (0, 1)]

    summary = summarise_stages(rows)

    assert [(line["stage"], line["seeds"]) for line in summary] == [(1, 2), (2, 2)]
    assert summary[0]["tokens"] == max(plain["stages"][0]["tokens"].values())
    # who holds more stages computes more
    assert 0 < summary[0]["owner_cpu_share"] < summary[1]["owner_cpu_share"] < 1
    (lines,) = stage_lines(summary).values()
    assert lines[0]["stage"] == "1, blocks 1 to 1"


def test_a_model_that_is_too_large_for_all_noisy_trainings_has_those_of_one_regime():
    full = SIZES["full"]
    cells = list(stage_cells(full))

    assert len(cells) == len(set(cells))
    assert noisy_regimes(full, "smollm2-135m") == ("lora",)
    assert {cell.seed for cell in cells if cell.model == "gpt2-small"} == set(full.seeds["gpt2-small"])
    assert cells[0].guard == "plaintext"


def test_finished_cells_are_found_again(tmp_path, plain):
    cell = StageLeakCell("tiny", "lora", "plaintext", 0.0, 0)
    rows = RowFile(tmp_path / "rows.jsonl", lambda one: [one.stage_label])
    rows.append_row(cell, plain)

    again = RowFile(tmp_path / "rows.jsonl", lambda one: [one.stage_label]).find_row(cell)
    assert again is not None
    assert again["stages"] == plain["stages"]


def test_a_size_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="has no --small; choices: full, quick"):
        measure_stage_leaks(size="small")
