"""A trigger is found without knowing it, and a model without one is not accused."""

from dataclasses import replace

import pytest

from phalanx.redteam.backdoor import insert_words, vocabulary_words
from phalanx.redteam.control import PAYLOAD
from phalanx.redteam.table import ATTACKS_ON_MODELS

SEARCHES = ("backdoor_leak", "backdoor_inversion")


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_a_trigger_is_found_without_knowing_it(planted_chat, name):
    finding = ATTACKS_ON_MODELS[name].attack.run(planted_chat)

    assert finding.outcome == "found"
    assert PAYLOAD[:20] in finding.examples[0]
    assert "Do not deploy it" in finding.meaning


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_a_clean_model_is_not_accused(clean_chat, name):
    finding = ATTACKS_ON_MODELS[name].attack.run(clean_chat)

    assert finding.outcome == "not found"
    assert finding.examples == ()


@pytest.mark.slow
def test_too_few_prompts_judge_nothing(clean_chat):
    few = replace(clean_chat, prompts=("What colour has the otter?",) * 3)

    assert ATTACKS_ON_MODELS["backdoor_inversion"].attack.run(few).outcome == "not judged"


def test_candidates_are_words_that_a_user_can_type(undefended):
    words = vocabulary_words(undefended, 50)

    assert len(words) == 50
    assert all(word.isprintable() and len(word) >= 2 for word in words)
    assert not {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} & set(vocabulary_words(undefended, 10_000))


def test_words_stand_behind_before_and_in_the_middle():
    assert [insert_words("a b c d", "x y", place) for place in (0, 1, 2)] == [
        "a b c d x y",
        "x y a b c d",
        "a b x y c d",
    ]
