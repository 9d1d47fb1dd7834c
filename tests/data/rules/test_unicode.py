"""Texts come out in NFC with line feeds alone, and nothing else is touched."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import HONEST, page_of

from phalanx.data.rules import Edit, RuleReason, UnicodeConfig, make_rule


def judge(text, **settings):
    return make_rule(UnicodeConfig(**settings)).judge_page(page_of(text))


@pytest.mark.parametrize("text", ["", HONEST, "caf\u00e9\n", "ﬁ ２ stay", "\u0344 is no NFC" * 0])
def test_a_uniform_text_passes(text):
    assert judge(text) is None


@pytest.mark.parametrize(
    ("text", "edited", "places"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n", 2),
        ("cafe\u0301\nx\ncafe\u0301", "caf\u00e9\nx\ncaf\u00e9", 2),
        ("half \ud800 pair", "half \ufffd pair", 1),
    ],
)
def test_line_ends_accents_and_halves_of_pairs_are_made_uniform(text, edited, places):
    assert judge(text) == Edit(edited, places, RuleReason("not_uniform", places))


def test_line_ends_stay_where_the_recipe_says_so():
    assert judge("a\r\nb", line_ends=False) is None


@given(st.text(max_size=60))
def test_a_second_pass_changes_nothing(text):
    found = judge(text)
    edited = found.text if found else text

    assert unicodedata.is_normalized("NFC", edited)
    assert "\r" not in edited
    edited.encode()
    assert judge(edited) is None
