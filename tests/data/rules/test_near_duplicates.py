"""Documents that differ in few words come down to one, by exact similarity and in one way only."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pages import TextsInMemory, decide, page_of

from phalanx.data.rules import Drop, NearDuplicatesConfig, RuleReason, make_rule
from phalanx.data.rules.duplicates.near_duplicates import jaccard_similarity
from phalanx.data.sources import Document, MailConfig, WarcConfig, open_source

pytest.importorskip("rensa")

WORDS = [f"word{number}" for number in range(400)]


def text_of(seed, count=200):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def edited(text, edits, seed=0):
    words = text.split()
    for at in random.Random(seed).sample(range(len(words)), edits):
        words[at] = "other"
    return " ".join(words)


def judge(texts, **given_settings):
    return decide(make_rule(NearDuplicatesConfig(**given_settings)), texts)


def test_different_documents_pass():
    assert judge([text_of(seed) for seed in range(30)]) == {}
    assert judge([]) == {}


def test_a_copy_with_few_edits_is_dropped_and_names_the_one_that_stays():
    text = text_of(1)

    found = judge([text_of(2), text, text_of(3), edited(text, 3), text.upper() + "!"])

    near = Drop(RuleReason("near_duplicate_of", "document 1", 0.7))
    assert found == {3: near, 4: near}


def test_the_longest_stays_where_the_recipe_says_so():
    text = text_of(1)

    found = judge([text, text + " and some more words", text], keep="longest")

    assert set(found) == {0, 2}
    assert found[0].reason.value == "document 1"


@pytest.mark.parametrize("text", ["", "two words", "... --- ..."])
def test_documents_shorter_than_a_shingle_are_never_near(text):
    assert judge([text, text]) == {}


def test_the_border_of_similarity_is_allowed_and_below_it_a_pair_counts_for_nothing():
    one, other = text_of(1), edited(text_of(1), 4)
    similarity = jaccard_similarity(*(np.unique(page_of(text).plain_grams(5)) for text in (one, other)))

    # bands of one row each make a candidate of nearly everything: the verdict is the exact similarity's
    assert set(judge([one, other], similarity=similarity, bands=64, rows=1)) == {1}
    assert judge([one, other], similarity=similarity + 1e-9, bands=64, rows=1) == {}


def test_a_chain_of_pairs_is_one_group():
    first = text_of(1, 300)
    second = edited(first, 8, seed=1)
    third = edited(second, 8, seed=2)

    found = judge([third, text_of(5), first, second], bands=64, rows=2)

    assert {number: drop.reason.value for number, drop in found.items()} == {2: "document 0", 3: "document 0"}


def test_many_copies_are_compared_in_linear_time():
    texts = TextsInMemory([edited(text_of(1), 1, seed) for seed in range(300)])
    rule = make_rule(NearDuplicatesConfig())
    marks = [rule.mark_page(texts.read_page(number)) for number in range(300)]
    texts.reads = 0

    found = dict(rule.decide_outcomes(marks, texts))

    assert set(found) == set(range(1, 300))
    # each text once for its shingles, and the name of the one that stays for each that goes
    assert texts.reads <= 600


def test_a_mark_is_small_and_the_same_in_any_order():
    rule = make_rule(NearDuplicatesConfig())
    texts = [text_of(seed) for seed in range(5)]

    marks = [rule.mark_page(page_of(text)) for text in texts]

    assert [rule.mark_page(page_of(text)) for text in reversed(texts)] == marks[::-1]
    assert [len(mark) for mark in marks] == [4 + 8 * 20] * 5


SETS = st.sets(st.integers(0, 30))


@given(SETS, SETS)
def test_jaccard_is_the_share_of_common_elements(one, other):
    arrays = [np.array(sorted(each), np.uint64) for each in (one, other)]

    assert jaccard_similarity(*arrays) == (len(one & other) / len(one | other) if one and other else 0.0)


@settings(max_examples=20)
@given(st.permutations(range(8)))
def test_groups_do_not_depend_on_the_order_of_documents(order):
    base = [text_of(1), text_of(2)]
    texts = [edited(base[number % 2], 2, seed=number) for number in range(8)]

    found = judge([texts[number] for number in order])

    dropped = {order[at] for at in found}
    stays = {order[0], next(number for number in order if number % 2 != order[0] % 2)}
    assert dropped == set(range(8)) - stays


def archived(number, text):
    body = text.encode()
    head = f"WARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"WARC/1.0\r\nWARC-Target-URI: http://e.org/{number}\r\n{head}\r\n".encode() + body + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("share", "keys", "least"),
    [(0.01, {}, 40), (0.03, {}, 36), (0.1, {"similarity": 0.3, "shingle": 2, "rows": 3}, 39)],
)
def test_a_mail_and_its_edited_copy_in_a_web_archive_come_down_to_one(tmp_path, share, keys, least):
    pytest.importorskip("fastwarc")
    texts = [text_of(seed, 300) for seed in range(40)]
    mails = (f"From me\nSubject: note {number}\n\n{text}\n\n" for number, text in enumerate(texts))
    (tmp_path / "a.mbox").write_text("".join(mails))
    copies = (edited(text, round(300 * share), seed) for seed, text in enumerate(texts))
    (tmp_path / "a.warc").write_bytes(b"".join(archived(number, text) for number, text in enumerate(copies)))
    sources = [open_source(MailConfig(path=tmp_path / "a.mbox")), open_source(WarcConfig(path=tmp_path / "a.warc"))]
    documents = [one for source in sources for one in source.documents() if isinstance(one, Document)]

    found = judge([one.text for one in documents], **keys)

    assert len(documents) == 80
    # of each pair the mail, which comes first, stays; nothing else is dropped
    assert all(number >= 40 and drop.reason.value == f"document {number - 40}" for number, drop in found.items())
    assert len(found) >= least
