"""The expected leak of each stage: what was measured, the worse of two places, or another model's and said to be."""

import json

import pytest

from phalanx.errors import InputError
from phalanx.planner.cuts import read_stage_leaks


def row(first_layer, tokens, **changes):
    return {
        "model": "tiny",
        "regime": "full",
        "guard": "plaintext",
        "first_layer": first_layer,
        "end_layer": first_layer + 2,
        "tokens": tokens,
        "tokens_chance": 0.05,
        "labels": tokens / 2,
        "labels_chance": 0.04,
        "properties": {"domain": 0.9},
        "properties_chance": {"domain": 0.5},
        **changes,
    }


def table_of(shape, tmp_path, rows=None):
    sizes = {"tiny": {"layers": shape.layers, "hidden": shape.hidden, "vocab": shape.vocab}}
    path = tmp_path / "stage-leaks.json"
    rows = [row(1, 1.0), row(3, 0.8), row(5, 0.9), row(1, 0.1, guard="sealed")] if rows is None else rows
    path.write_text(
        json.dumps({"command": "phalanx reproduce stage-leaks", "commit": None, "models": sizes, "summary": rows})
    )
    return read_stage_leaks(path)


def test_stages_that_were_measured_have_their_own_figures(tiny, tmp_path):
    leaks = table_of(tiny, tmp_path).leaks_of(tiny, "full", [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)])

    assert [(leak.stage, leak.tokens, leak.labels) for leak in leaks] == [(1, 1.0, 0.5), (2, 0.8, 0.4), (3, 0.9, 0.45)]
    assert {leak.basis for leak in leaks} == {"tiny, full: measured"}


def test_between_two_places_the_worse_one_counts(tiny, tmp_path):
    (leak,) = table_of(tiny, tmp_path).leaks_of(tiny, "full", [(0, 4), (4, 6), (6, 8)])

    assert leak.tokens == 0.9
    assert leak.basis == "tiny, full: between measured stages"
    assert leak.properties == {"domain": 0.9}


def test_another_model_has_the_leak_of_the_same_share_of_its_layers(tiny, gpt2, tmp_path):
    (leak,) = table_of(tiny, tmp_path).leaks_of(gpt2, "full", [(0, 6), (6, 11), (11, 12)])

    assert leak.basis == "tiny, full: another model, same share of its layers"


def test_a_way_of_training_that_was_not_measured_has_no_leak(tiny, tmp_path):
    assert table_of(tiny, tmp_path).leaks_of(tiny, "lora", [(0, 1), (1, 3), (3, 8)]) is None


MIXED = [row(1, 0.5), row(3, 0.5, properties={"other": 0.9})]


@pytest.mark.parametrize(
    "rows", [[], [row(1, 2.0)], [row(1, 0.5, guard="sealed")], [row(1, 0.5, model="unknown")], MIXED, "nothing"]
)
def test_a_file_without_plaintext_stages_is_refused(tiny, tmp_path, rows):
    with pytest.raises(InputError, match="is no table of stages that were measured in plaintext"):
        table_of(tiny, tmp_path, rows)
