"""A paragraph stays where it stands first, and is cut wherever it stands again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import HONEST, decide

from phalanx.data.rules import Drop, Edit, ParagraphDuplicatesConfig, RuleReason, make_rule

LONG = "This paragraph is long enough to be looked for in every other document of a build, more than once. " * 2
OTHER = LONG.upper()


def judge(texts, **settings):
    return decide(make_rule(ParagraphDuplicatesConfig(**settings)), texts)


@pytest.mark.parametrize("texts", [[], [""], ["", ""], [HONEST], ["short", "short"], [LONG, OTHER]])
def test_what_stands_once_or_is_short_passes(texts):
    assert judge(texts) == {}


def test_a_later_paragraph_is_cut_with_the_line_feeds_behind_it():
    found = judge([f"{LONG}\n\nfirst", f"before\n\n\n{LONG}\n\nafter\n", f"{OTHER}\n\n{LONG}\n\n{OTHER}"])

    assert found == {
        1: Edit("before\n\n\nafter\n", 1, RuleReason("repeated_paragraphs", 1)),
        2: Edit(f"{OTHER}\n\n", 2, RuleReason("repeated_paragraphs", 2)),
    }


def test_a_paragraph_ends_at_an_empty_line_of_windows_too():
    assert judge([LONG, f"before\r\n\r\n{LONG}\r\n\r\nafter"]) == {
        1: Edit("before\r\n\r\nafter", 1, RuleReason("repeated_paragraphs", 1))
    }


def test_a_document_of_nothing_else_is_dropped():
    assert judge([LONG, f"  {LONG}\n\n{LONG} "]) == {1: Drop(RuleReason("repeated_paragraphs", 2))}


def test_lines_are_compared_where_the_recipe_says_so():
    texts = [f"a\n{LONG}\nb", f"c\n{LONG}\nd"]

    assert judge(texts) == {}
    assert judge(texts, unit="line") == {1: Edit("c\nd", 1, RuleReason("repeated_lines", 1))}


def test_the_border_of_length_is_looked_for_itself():
    assert set(judge(["x" * 10, "x" * 10 + "\n\ny"], min_characters=10)) == {1}
    assert judge(["x" * 10, "x" * 10 + "\n\ny"], min_characters=11) == {}


@given(st.lists(st.lists(st.sampled_from(["aaaa", "bbbb", "cc", "dddd"])).map("\n\n".join), max_size=8))
def test_every_long_paragraph_stays_exactly_once(texts):
    found = judge(texts, min_characters=4)

    edited = [
        "" if isinstance(found.get(at), Drop) else found[at].text if at in found else text
        for at, text in enumerate(texts)
    ]
    for part in ("aaaa", "bbbb", "dddd"):
        assert sum(text.split("\n\n").count(part) for text in edited) == any(part in text for text in texts)
    assert sum(text.split("\n\n").count("cc") for text in edited) <= sum(text.count("cc") for text in texts)
