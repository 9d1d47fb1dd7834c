"""What repeats itself is dropped; counts are those of a plain search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import HONEST, page_of

from phalanx.data.rules import Drop, GopherRepetitionConfig, RuleReason, make_rule
from phalanx.data.rules.gopher_repetition import repeated_gram_characters, repeated_parts, top_gram_characters


def judge(text, **settings):
    return make_rule(GopherRepetitionConfig(**settings)).judge_page(page_of(text))


def test_prose_passes():
    assert judge(HONEST) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", RuleReason("characters", 0, 1)),
        ("one\n\ntwo\n\ntwo", RuleReason("repeated_paragraphs", 1 / 3, 0.3)),
        ("one\n\ntwo\n\nthree\n\na long one\n\na long one", RuleReason("repeated_paragraph_characters", 10 / 39, 0.2)),
        ("one\ntwo\ntwo", RuleReason("repeated_lines", 1 / 3, 0.3)),
        ("one\ntwo\nthree\na long one\na long one", RuleReason("repeated_line_characters", 10 / 35, 0.2)),
        ("so it goes and so it went", RuleReason("top_2_gram", 10 / 25, 0.2)),
    ],
)
def test_the_first_broken_border_is_told_with_its_value(text, reason):
    assert judge(text) == Drop(reason)


def test_a_repeated_run_of_words_is_told_by_its_length():
    run = "alpha beta gamma delta epsilon"
    other = " ".join(f"word{number}" for number in range(20))

    found = judge(f"{run} {other} {run} more", max_top_grams=(1.0, 1.0, 1.0))

    size = len(f"{run} {other} {run} more")
    assert found == Drop(RuleReason("repeated_5_grams", len(run.replace(" ", "")) / size, 0.15)) or found is None
    assert (found is not None) == (len(run.replace(" ", "")) / size > 0.15)


def test_a_border_is_allowed_itself():
    text = "one\ntwo\nthree\ntwo"

    assert judge(text, max_lines=0.25, max_line_characters=1.0, max_top_grams=(1.0, 1.0, 1.0)) is None
    assert judge(text, max_lines=0.24) == Drop(RuleReason("repeated_lines", 0.25, 0.24))


def plain_search(terms, count):
    """The published procedure, step by step."""
    seen, characters, at = set(), 0, 0
    while at < len(terms) - count + 1:
        gram = tuple(terms[at : at + count])
        if gram in seen:
            characters += sum(map(len, gram))
            at += count
        else:
            seen.add(gram)
            at += 1
    return characters


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=40), st.integers(2, 6))
def test_repeated_grams_are_counted_as_a_plain_search_does(terms, count):
    page = page_of(" ".join(terms))

    assert repeated_gram_characters(page, count) == plain_search(terms, count)


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=40), st.integers(2, 4), st.integers(0, 60))
def test_the_most_frequent_gram_is_counted_with_its_spaces(terms, count, border):
    runs = [" ".join(terms[at : at + count]) for at in range(len(terms) - count + 1)]
    top = max(runs, key=runs.count) if runs else ""
    page = page_of(" ".join(terms))

    assert top_gram_characters(page, count) == len(top) * runs.count(top)
    bounded = top_gram_characters(page, count, border)
    assert bounded == len(top) * runs.count(top) or (bounded == 0 and len(top) * runs.count(top) <= border)


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=40))
def test_no_verdict_depends_on_what_is_left_out_for_speed(terms):
    text = " ".join(terms) or "a"
    config = GopherRepetitionConfig(max_paragraphs=1.0, max_lines=1.0, max_top_grams=(99.0, 99.0, 99.0))
    expected = any(
        plain_search(terms, count) / len(text) > most
        for count, most in zip(range(5, 11), config.max_repeated_grams, strict=True)
    )

    assert isinstance(make_rule(config).judge_page(page_of(text)), Drop) == expected


@given(st.lists(st.text("ab", max_size=3)))
def test_repeated_parts_are_those_seen_before(parts):
    repeats = [part for at, part in enumerate(parts) if part in parts[:at]]

    assert repeated_parts(parts) == (len(repeats), sum(map(len, repeats)))
