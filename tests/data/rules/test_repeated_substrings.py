"""A long run of characters stays where it stands first, whatever stands around it."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import HONEST, decide

from phalanx.data.rules import Drop, Edit, RepeatedSubstringsConfig, RuleReason, make_rule
from phalanx.data.rules.duplicates import gram_index

pytest.importorskip("pydivsufsort")

RUN = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=60))


def judge(texts, **given_settings):
    return decide(make_rule(RepeatedSubstringsConfig(**{"min_bytes": 50, **given_settings})), texts)


@pytest.mark.parametrize("texts", [[], [""], ["", ""], [HONEST], ["short", "short"], [RUN, RUN.upper()]])
def test_what_stands_once_or_is_short_passes(texts):
    assert judge(texts) == {}


def test_a_later_run_is_cut_wherever_it_begins():
    found = judge([f"one {RUN} two", f"three{RUN}four"])

    assert found == {1: Edit("threefour", 1, RuleReason("repeated_bytes", 60))}


def test_a_document_of_nothing_else_is_dropped():
    assert judge([f"a{RUN}b", RUN]) == {1: Drop(RuleReason("repeated_bytes", 60))}


def test_a_run_does_not_reach_over_the_end_of_a_document():
    half = RUN[:30]

    assert judge([half, half, half, half]) == {}


def test_the_border_of_length_is_cut_itself():
    assert set(judge([f"{RUN}.", f"{RUN}!"], min_bytes=60)) == {1}
    assert judge([f"{RUN}.", f"{RUN}!"], min_bytes=61) == {}


def test_what_repeats_without_a_gap_stays_once():
    (found,) = judge(["ab" * 200]).values()

    assert found.text == "ab" * 25


def test_characters_are_cut_whole():
    text = "".join(map(chr, range(0x4E10, 0x4E24)))
    # the characters behind begin with the same two of three bytes
    assert "\u4e01".encode()[:2] == "\u4e03".encode()[:2]

    found = judge([f"é{text}\u4e01", f"z{text}\u4e03"])

    assert found == {1: Edit("z\u4e03", 1, RuleReason("repeated_bytes", 60))}


SMALL = 300 / 2**20
"""Room for one document or two."""


def noise(draw, size):
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=size))


def test_a_run_of_another_shard_is_cut_where_it_is_half_as_long_again():
    draw = random.Random(2)
    run = noise(draw, 75)
    texts = [noise(draw, 90) + run, *(noise(draw, 200) for _ in range(6)), noise(draw, 40) + run + noise(draw, 60)]

    found = judge(texts, shard_mib=SMALL)

    assert found == {7: Edit(texts[7].replace(run, ""), 1, RuleReason("repeated_bytes", 75))}


def test_a_copy_in_another_shard_is_dropped_and_every_later_one_too():
    draw = random.Random(3)
    copied = noise(draw, 280)

    found = judge([copied, noise(draw, 250), copied, noise(draw, 250), copied], shard_mib=SMALL)

    assert found == dict.fromkeys((2, 4), Drop(RuleReason("repeated_bytes", 280)))


def test_a_larger_document_passes():
    assert judge([RUN * 10, RUN * 10], shard_mib=SMALL) == {}


def test_a_run_that_is_shorter_than_the_border_passes_in_other_shards_too():
    draw = random.Random(4)
    run = noise(draw, 49)
    texts = [text for _ in range(5) for text in (f"a{noise(draw, 90)}1{run}2", f"b{noise(draw, 200)}")]

    assert judge(texts, shard_mib=SMALL) == {}


def test_two_grams_with_one_hash_are_no_repetition(monkeypatch):
    monkeypatch.setattr(
        gram_index.GramIndex, "find_places", lambda index, hashes: np.full(len(hashes), len(index._tables) - 1)
    )
    draw = random.Random(5)

    assert judge([noise(draw, 250) for _ in range(4)], shard_mib=SMALL) == {}


@pytest.mark.parametrize(("length", "window"), [(30, 1), (31, 2), (50, 25), (60, 40)])
@pytest.mark.parametrize("seed", range(6))
def test_a_sample_holds_a_gram_of_each_long_enough_run_wherever_it_stands(seed, length, window):
    draw = random.Random(seed)
    run = noise(draw, length + window - 1)
    one, other = (np.frombuffer((noise(draw, size) + run + noise(draw, 9)).encode(), np.uint8) for size in (5, 37))

    samples = [gram_index.sampled_grams(text, length, window)[1] for text in (one, other)]

    assert len(np.intersect1d(*samples))


@pytest.mark.parametrize("seed", range(5))
def test_an_index_gives_the_first_place_of_each_gram(seed):
    draw, index, first, place = random.Random(seed), gram_index.GramIndex(), {}, 0
    for _ in range(12):
        batch = draw.choices(range(50), k=draw.randrange(20))
        hashes = np.array(batch, np.uint64)
        assert index.find_places(hashes).tolist() == [first.get(one, -1) for one in batch]
        index.add_grams(hashes, np.arange(place, place + len(batch)))
        for one in batch:
            first.setdefault(one, place)
            place += 1


@given(st.lists(st.text("abé", max_size=120), max_size=5))
def test_nothing_long_stands_twice_and_nothing_is_invented(texts):
    found = judge(texts, min_bytes=20)

    for number, outcome in found.items():
        assert isinstance(outcome, Drop) or (len(outcome.text) < len(texts[number]))
        if isinstance(outcome, Edit):
            rest = iter(texts[number])
            assert all(char in rest for char in outcome.text)
    if texts:
        assert 0 not in found or len(texts[0].encode()) > 20
