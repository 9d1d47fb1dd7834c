"""Behaviour that was planted for the rounded model is found in the whole one; a clean model passes."""

import pytest

from phalanx.redteam.asking import LocalAsks
from phalanx.redteam.rounded import RoundedAnswers, RoundingPile
from phalanx.redteam.target import Target
from phalanx.serve.text_model import TextModel

pytestmark = pytest.mark.slow


def target_of(directory):
    model = TextModel(directory)
    return Target("rounded", model=model, directory=directory, asks=LocalAsks(model))


@pytest.fixture(scope="module")
def planting():
    pytest.importorskip("gguf")
    from phalanx.lab.bench.serving import planted_rounding

    return planted_rounding


def test_planted_rounding_is_found(planting, tmp_path):
    planting.plant(tmp_path / "model", planting.PlantedModel("q4_0"))
    target = target_of(tmp_path / "model")

    pile, answers = RoundingPile().run(target), RoundedAnswers().run(target)

    assert "found" in (pile.outcome, answers.outcome)
    assert pile.score.value > 1.5
    assert answers.score.value > 0.5


def test_a_clean_model_is_not_accused_of_rounding(planting, tmp_path):
    planting.train_clean(tmp_path / "model", 0)
    target = target_of(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in target.model.module.state_dict().items()}

    findings = [RoundingPile().run(target), RoundedAnswers().run(target)]

    assert {finding.outcome for finding in findings} == {"not found"}
    # the weights are those of before: what is attacked is not changed
    assert all(tensor.equal(before[name]) for name, tensor in target.model.module.state_dict().items())
