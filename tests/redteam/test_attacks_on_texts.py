"""Each attack wins on an undefended model, and is at chance where the defence that answers it is on."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from phalanx.redteam.cloning import ModelClone
from phalanx.redteam.control import SmallModel, make_tokenizer, new_model, save_model
from phalanx.redteam.extraction import CanaryExposure, SpanExtraction
from phalanx.redteam.membership import ShadowMembership
from phalanx.redteam.reconstruction import ActivationInversion, GradientInversion
from phalanx.redteam.table import ATTACKS_ON_MODELS
from phalanx.redteam.target import Target, TextSet
from phalanx.serve.text_model import TextModel

MEMBERSHIPS = [
    name for name, entry in ATTACKS_ON_MODELS.items() if name.startswith("membership_") and not entry.is_slow
]
LEAKS = [*MEMBERSHIPS, "extraction", "canary_exposure"]


def finding_of(name, target):
    return ATTACKS_ON_MODELS[name].attack.run(target)


@pytest.mark.parametrize("name", MEMBERSHIPS)
def test_membership_is_told_on_texts_known_by_heart(undefended, name):
    finding = finding_of(name, undefended)

    assert finding.outcome == "found"
    assert finding.score.value >= 0.95
    assert finding.details["found_at_1_percent"] >= 0.5
    assert finding.examples


@pytest.mark.parametrize("name", LEAKS)
def test_a_model_that_never_saw_the_texts_gives_none_away(defended, name):
    finding = finding_of(name, defended)

    assert finding.outcome == "not found"
    assert finding.score.interval[0] <= finding.score.chance <= finding.score.interval[1]
    assert finding.examples == ()


def test_training_texts_come_out_word_for_word(undefended):
    finding = SpanExtraction().run(undefended)

    assert finding.outcome == "found"
    assert finding.score.value >= 0.8
    assert finding.details["strangers_share"] <= 0.1


def test_spans_over_the_end_of_a_text_are_not_asked(undefended):
    """Rows of a run hold several texts, and no answer goes on behind the end of one."""
    members, end = undefended.members, min(undefended.text_model.end_tokens)
    packed = tuple((*row[:20], end, *row[:20]) for row in members.rows)
    both = replace(members, rows=(*members.rows, *packed))

    alone, beside = SpanExtraction().run(undefended), SpanExtraction().run(replace(undefended, members=both))

    assert (beside.score.value, beside.score.n) == (alone.score.value, alone.score.n)


def test_planted_canaries_are_exposed_as_far_as_the_candidates_show(undefended):
    finding = CanaryExposure(candidates=127).run(undefended)

    assert finding.details["exposure_bits"] == finding.details["max_bits"] == 7.0
    assert finding.outcome == "found"


def test_a_clear_gradient_gives_its_tokens_away_and_noise_hides_them(undefended):
    clear = GradientInversion().run(undefended)
    noisy = GradientInversion(clip=1.0, noise=1.0).run(undefended)

    assert clear.score.value >= 0.8
    assert clear.outcome == "found"
    assert noisy.outcome == "not found"
    assert noisy.score.interval[0] <= noisy.score.chance + 0.1


@pytest.mark.parametrize("guard", ["sealed", "masked"])
def test_states_that_cross_a_cut_give_the_tokens_unless_they_are_hidden(undefended, guard):
    clear = ActivationInversion().run(undefended)
    hidden = ActivationInversion(guard=guard).run(undefended)

    assert clear.score.value >= 0.8
    assert hidden.outcome == "not found"


@pytest.mark.parametrize("name", ["activation_clustering", "spectral_signatures", "planted_phrases"])
def test_planted_training_texts_stand_out(undefended, name):
    finding = finding_of(name, undefended)
    clean = finding_of(name, replace(undefended, members=undefended.strangers))

    assert finding.outcome == "found"
    assert any("cobaltite" in example for example in finding.examples)
    assert clean.outcome == "not found"


def test_the_phrase_of_two_sources_is_no_plant(undefended):
    members = undefended.members
    sources = tuple(f"source {number % 2}" for number in range(len(members)))

    finding = finding_of("planted_phrases", replace(undefended, members=replace(members, sources=sources)))

    assert finding.outcome == "not found"


def test_what_a_target_lacks_is_named():
    assert "--members" in Target("x").missing_needs(("data",))
    assert "weights" in Target("x").missing_needs(("weights", "gradients"))
    assert "--reference" in Target("x").missing_needs(("reference",))


def test_texts_of_few_tokens_are_left_out(undefended):
    texts = TextSet.from_texts(undefended.model.tokenizer, ["a", "", "Anna painted two boats in Oslo."], 64)

    assert len(texts) == 1


def test_spans_that_no_text_is_long_enough_for_are_not_judged(undefended):
    finding = SpanExtraction(prefix=400).run(undefended)

    assert finding.outcome == "not judged"


def test_weights_that_are_not_finite_are_no_leak(tmp_path):
    tokenizer = make_tokenizer(["Anna painted two boats in Oslo."] * 40, 270)
    model = new_model(tokenizer, SmallModel())
    with torch.no_grad():
        nn.init.constant_(model.lm_head.weight, float("nan"))
    save_model(model, tokenizer, tmp_path / "model")
    text_model = TextModel(tmp_path / "model")
    texts = TextSet.from_texts(text_model.tokenizer, ["Anna painted two boats in Oslo."] * 8, 64)

    finding = finding_of("membership_loss", Target("nan", model=text_model, members=texts, strangers=texts))

    assert finding.outcome == "not found"


@pytest.mark.slow
def test_a_clone_agrees_and_a_budget_of_queries_prevents_it(undefended):
    copied = ModelClone().run(undefended)
    limited = ModelClone(queries=1, length=8).run(undefended)

    assert copied.score.value >= 0.9
    assert copied.outcome == "found"
    assert limited.outcome == "not found"


@pytest.mark.slow
def test_shadow_models_tell_members(undefended, defended):
    # shadows are trained as the target was; with half of its steps the area is .92
    attack = ShadowMembership()

    assert attack.run(undefended).score.value >= 0.95
    assert attack.run(defended).outcome == "not found"
