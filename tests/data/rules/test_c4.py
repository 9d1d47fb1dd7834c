"""Lines that are no sentences are cut; a document with too few sentences left is dropped."""

import pytest
from made_pages import HONEST, page_of

from phalanx.data.rules import C4Config, Drop, Edit, RuleReason, make_rule

FIVE = "One is here. Two is here. Three is here. Four is here. Five is here."


def judge(text, **settings):
    return make_rule(C4Config(**settings)).judge_page(page_of(text))


def test_a_text_of_sentences_passes_as_it_is():
    assert judge(HONEST.replace("\n\n", "\n").strip()) is None


@pytest.mark.parametrize(
    "line",
    [
        "Home | News | Contact",
        "Read more...",
        "Two words.",
        "Please enable JavaScript in your browser.",
        "This site uses cookies and more.",
        f"A word of {'x' * 1001} characters is here.",
    ],
)
def test_a_line_that_is_no_sentence_is_cut(line):
    assert judge(f"{FIVE}\n{line}") == Edit(FIVE, 1, RuleReason("lines_cut", 1))


def test_citations_are_taken_out_of_lines_that_stay():
    assert judge(FIVE.replace("here.", "here[1].")) == Edit(FIVE, 1, RuleReason("lines_cut", 0))
    assert judge(FIVE.replace("here.", "here[1]."), remove_citations=False) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", RuleReason("sentences", 0, 5)),
        ("Too short is this.", RuleReason("sentences", 1, 5)),
        (FIVE.removesuffix(" Five is here."), RuleReason("sentences", 4, 5)),
        (f"{FIVE}\nLorem ipsum dolor sit amet.", RuleReason("lorem_ipsum", 1, 0)),
        (f"{FIVE}\nThe braces {{ are here }}.", RuleReason("braces", 1, 0)),
    ],
)
def test_what_drops_a_document_is_told(text, reason):
    assert judge(text) == Drop(reason)


def test_a_brace_in_a_line_that_is_cut_drops_nothing():
    assert judge(f"{FIVE}\nfunction() {{") == Edit(FIVE, 1, RuleReason("lines_cut", 1))
    assert judge(f"{FIVE}\nThe braces {{ are here }}.", drop_braces=False) is None


def test_the_border_of_sentences_is_allowed_itself():
    assert judge(FIVE, min_sentences=5) is None
    assert judge(FIVE, min_sentences=6) == Drop(RuleReason("sentences", 5, 6))


@pytest.mark.parametrize(
    "line", ["What is this?! It is. ", 'He said "yes." Then he went.', "Dr. Smith went home.\nSo did she now."]
)
def test_marks_that_follow_each_other_end_one_sentence(line):
    assert judge(line, min_sentences=3) == Drop(RuleReason("sentences", 2, 3))
