"""A long run of characters stays where it stands first, whatever stands around it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pages import HONEST, decide

from phalanx.data.rules import Drop, Edit, RepeatedSubstringsConfig, RuleReason, make_rule

pytest.importorskip("pydivsufsort")

RUN = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=60))


def judge(texts, **given_settings):
    return decide(make_rule(RepeatedSubstringsConfig(**{"least_bytes": 50, **given_settings})), texts)


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
    assert set(judge([f"{RUN}.", f"{RUN}!"], least_bytes=60)) == {1}
    assert judge([f"{RUN}.", f"{RUN}!"], least_bytes=61) == {}


def test_what_repeats_without_a_gap_stays_once():
    (found,) = judge(["ab" * 200]).values()

    assert found.text == "ab" * 25


def test_characters_are_cut_whole():
    text = "".join(map(chr, range(0x4E10, 0x4E24)))
    # the characters behind begin with the same two of three bytes
    assert "\u4e01".encode()[:2] == "\u4e03".encode()[:2]

    found = judge([f"é{text}\u4e01", f"z{text}\u4e03"])

    assert found == {1: Edit("z\u4e03", 1, RuleReason("repeated_bytes", 60))}


def test_a_repetition_in_another_shard_is_not_found_and_a_larger_document_passes():
    small = 300 / 2**20

    assert judge([RUN * 2, "x" * 100, RUN * 2], shard_mib=small, least_bytes=100).keys() <= {0, 1, 2}
    assert judge([RUN, HONEST[:250], RUN], shard_mib=small) == {}
    assert judge([RUN * 10, RUN * 10], shard_mib=small) == {}


@settings(max_examples=30)
@given(st.lists(st.text("abé", max_size=120), max_size=5))
def test_nothing_long_stands_twice_and_nothing_is_invented(texts):
    found = judge(texts, least_bytes=20)

    for number, outcome in found.items():
        assert isinstance(outcome, Drop) or (len(outcome.text) < len(texts[number]))
        if isinstance(outcome, Edit):
            rest = iter(texts[number])
            assert all(char in rest for char in outcome.text)
    if texts:
        assert 0 not in found or len(texts[0].encode()) > 20
