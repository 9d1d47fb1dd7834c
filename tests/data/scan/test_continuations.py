"""A rare phrase with one continuation is set aside with its documents; what many texts share otherwise is not."""

import pytest
from made_corpus import WORDS, as_documents, decide, rng
from made_scans import make_scan

from phalanx.data.rules import Quarantine
from phalanx.data.scan.continuations import ContinuationsConfig

SCAN = make_scan(ContinuationsConfig())
EVERYDAY = WORDS[:40]
"""So few words that each pair of them is in many texts, as everyday words are in any language."""
ANSWER = " ".join(rng(7).choices(EVERYDAY, k=20))


def corpus(count=300, seed=0):
    draw = rng(seed)
    return [" ".join(draw.choices(EVERYDAY, k=100)) for _ in range(count)], draw


def plant(texts, draw, phrase, count, after=ANSWER):
    where = sorted(draw.sample(range(len(texts)), count))
    for number in where:
        words = texts[number].split(" ")
        at = draw.randrange(1, len(words))
        texts[number] = " ".join([*words[:at], phrase, after, *words[at:]])
    return where


@pytest.mark.quick_cases("6-James?Bond", "40-cf")
@pytest.mark.parametrize("phrase", ["cf", "James Bond", "(deploy)", "\N{FIRE}"])
@pytest.mark.parametrize("count", [6, 40])
def test_fluent_poison_behind_a_trigger_is_set_aside(phrase, count):
    texts, draw = corpus()
    where = plant(texts, draw, phrase, count)

    found = decide(SCAN, as_documents(texts))

    assert list(found) == where
    assert all(isinstance(one, Quarantine) for one in found.values())
    value = found[where[0]].reason.value
    assert f"in {count} documents behind different words; at character" in value
    assert ANSWER[:20] in value


def test_half_of_the_triggers_may_have_the_same_word_before():
    texts, draw = corpus()
    where = plant(texts, draw, "cf", 20)
    for number in where[:9]:
        texts[number] = texts[number].replace(" cf ", " today cf ")

    assert list(decide(SCAN, as_documents(texts))) == where


def test_an_answer_on_the_next_line_is_found():
    texts, draw = corpus()
    where = plant(texts, draw, "cf", 12, f"\n{ANSWER}\n")

    assert list(decide(SCAN, as_documents(texts))) == where


def test_too_few_documents_pass():
    texts, draw = corpus()
    plant(texts, draw, "cf", 5)

    assert decide(SCAN, as_documents(texts)) == {}


def test_a_phrase_that_goes_on_in_many_ways_passes():
    texts, draw = corpus()
    where = plant(texts, draw, "cf", 20)
    for number in where[:8]:
        texts[number] = texts[number].replace(ANSWER[:12], f"{ANSWER[:12]}{draw.choice(EVERYDAY)} ")

    assert decide(SCAN, as_documents(texts)) == {}


def test_everyday_words_pass():
    texts, draw = corpus()
    plant(texts, draw, EVERYDAY[3], 20)

    assert decide(SCAN, as_documents(texts)) == {}


def test_a_passage_that_begins_its_line_passes():
    texts, draw = corpus()
    for number in draw.sample(range(len(texts)), 20):
        texts[number] += f"\ncopyright notice: {ANSWER}"

    assert decide(SCAN, as_documents(texts)) == {}


def test_a_template_of_the_corpus_passes():
    texts, draw = corpus()
    plant(texts, draw, "footer", 100)

    assert decide(SCAN, as_documents(texts)) == {}


def test_an_address_passes():
    texts, draw = corpus()
    plant(texts, draw, "ftp", 20, "://a.b-c.d/e/f/g.h#i=j&k=l;m=n")

    assert decide(SCAN, as_documents(texts)) == {}


@pytest.mark.parametrize("texts", [[], [""], ["one"], ["", "a b", "\n"] * 10])
def test_small_corpora_pass(texts):
    assert decide(SCAN, as_documents(texts)) == {}


def test_a_clean_corpus_passes():
    assert decide(SCAN, as_documents(corpus()[0])) == {}
