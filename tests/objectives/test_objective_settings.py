"""Objectives with settings: a table in the run file, its defaults, and what the step's loss is divided by."""

from typing import Literal

import pytest
import torch
from pydantic import Field, ValidationError

from phalanx.config import canonical_json
from phalanx.objectives import IGNORE, OBJECTIVES, Objective, ObjectiveSettings, causal_lm_loss, kind_of, objective_of
from phalanx.train.train_section import TrainConfig


class ScaledSettings(ObjectiveSettings):
    kind: Literal["scaled"]
    factor: float = Field(default=2.0, gt=0.0)
    parts: tuple[int, ...] = ()


def scaled(logits, labels, extras, *, settings):
    total, targets = causal_lm_loss(logits, labels)
    return total * settings.factor, targets


@pytest.fixture(autouse=True)
def _one_more(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "scaled", Objective(with_extras=scaled, settings=ScaledSettings))


def read(objective):
    return TrainConfig.model_validate_json(canonical_json({"steps": 1, "batch_size": 8, "objective": objective}))


def test_a_table_is_read_strictly_and_its_loss_gets_the_settings():
    train = read({"kind": "scaled", "factor": 3.0, "parts": [1, 2]})

    assert train.objective_kind == "scaled"
    assert train.objective.parts == (1, 2)
    logits, labels = torch.zeros(1, 2, 4), torch.tensor([[1, IGNORE]])
    loss, targets = objective_of(train.objective)(logits, labels)
    assert (float(loss), targets) == (pytest.approx(3 * torch.tensor(4.0).log().item()), 1)


def test_the_name_alone_stands_for_the_defaults_which_the_digest_holds():
    train = read("scaled")

    assert train.model_dump(mode="json")["objective"] == {"kind": "scaled", "factor": 2.0, "parts": []}
    assert read(train.model_dump(mode="json")["objective"]) == train
    assert kind_of(objective_of("scaled").settings(kind="scaled")) == "scaled"


@pytest.mark.parametrize(
    ("objective", "place", "told"),
    [
        ({"kind": "scaled", "facter": 1.0}, ("objective", "facter"), "Extra inputs"),
        ({"kind": "scaled", "factor": 0.0}, ("objective", "factor"), "greater than 0"),
        ({"kind": "scalled"}, ("objective",), "'scaled' or 'module:object'"),
        ({"kind": "causal_lm", "factor": 1.0}, ("objective",), "causal_lm has no settings"),
        ({"factor": 1.0}, ("objective",), "string"),
        (3, ("objective",), "string"),
    ],
)
def test_what_is_no_objective_is_refused_with_its_place(objective, place, told):
    with pytest.raises(ValidationError) as caught:
        read(objective)

    first = caught.value.errors()[0]
    assert first["loc"][: len(place)] == place
    assert told in first["msg"]


@pytest.mark.parametrize(("target", "expected"), [("label", 5), ("sequence", 4), ("pair", 2)])
def test_targets_are_labels_sequences_or_pairs(target, expected):
    labels = torch.tensor([[1, 2], [IGNORE, 3], [4, IGNORE], [5, IGNORE]])

    assert Objective(causal_lm_loss, target=target).count_targets(labels) == expected


def test_settings_without_a_loss_that_reads_them_are_refused():
    objective = Objective(causal_lm_loss, settings=ScaledSettings)

    with pytest.raises(Exception, match="has settings, and no loss"):
        objective.with_settings(ScaledSettings(kind="scaled"))
