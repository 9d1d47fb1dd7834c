"""A page's arrays are those of its text, whatever else this process has read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import HONEST, page_of

from phalanx.data.rules import term_table
from phalanx.data.rules.term_split import split_piece
from phalanx.data.rules.term_table import ALPHABETIC, PLAIN, SYMBOL, hash_term

TEXTS = st.text(st.sampled_from("abcA .,\n\t'-(é中9"), max_size=80)


@given(TEXTS)
def test_lengths_classes_and_hashes_are_those_of_the_terms(text):
    terms = [term for piece in text.split() for term in split_piece(piece)]

    page = page_of(text)

    assert page.term_lengths.tolist() == [len(term) for term in terms]
    assert page.term_ends.tolist() == np.cumsum([0, *map(len, terms)]).tolist()
    assert page.term_grams(1).tolist() == [hash_term(term) for term in terms]
    assert ((page.term_bits & ALPHABETIC) > 0).tolist() == [any(map(str.isalpha, term)) for term in terms]
    assert page.plain_grams(1).tolist() == [hash_term(t.lower()) for t in terms if any(map(str.isalnum, t))]


@given(TEXTS, st.integers(1, 6))
def test_two_grams_are_equal_exactly_where_their_terms_are(text, count):
    page = page_of(text)
    singles = page.term_grams(1).tolist()
    runs = [tuple(singles[at : at + count]) for at in range(len(singles) - count + 1)]

    grams = page.term_grams(count).tolist()

    assert len(grams) == len(runs)
    assert len(set(zip(runs, grams, strict=True))) == len(set(runs)) == len(set(grams))


def test_lines_and_paragraphs_are_the_same_with_line_ends_of_windows():
    text = "One line.\nAnother line.\n\nA paragraph.\n\n\nThe last one.\n"
    page, of_windows = page_of(text), page_of(text.replace("\n", "\r\n"))

    assert of_windows.filled_lines == page.filled_lines
    assert of_windows.paragraphs == page.paragraphs


def test_the_order_of_terms_counts_in_a_gram():
    assert page_of("a b").term_grams(2)[0] != page_of("b a").term_grams(2)[0]


def test_grams_do_not_depend_on_which_were_asked_for_before():
    page, other = page_of(HONEST), page_of(HONEST)
    page.term_grams(2)
    page.term_grams(7)

    assert page.term_grams(5).tolist() == other.term_grams(5).tolist()


def test_a_gram_longer_than_the_text_or_the_limit_is_none_or_refused():
    assert page_of("a b").term_grams(3).tolist() == []
    with pytest.raises(ValueError, match="allowed are 1 to 64"):
        page_of("a b").term_grams(65)


def test_a_full_table_is_replaced_and_older_pages_keep_theirs(monkeypatch):
    monkeypatch.setattr(term_table, "_of_thread", term_table._ThreadTable())
    monkeypatch.setattr(term_table, "_MAX_CHARACTERS", 20)
    old = page_of("a first text of more than twenty characters")
    terms = old.terms
    new = page_of("twenty characters more")

    assert new.term_table is old.term_table or new.terms.tolist() == [0, 1, 2]
    assert new.term_table is not old.term_table
    assert old.term_table.look_up_lengths(terms).tolist() == [1, 5, 4, 2, 4, 4, 6, 10]
    assert new.term_lengths.tolist() == [6, 10, 4]


def test_a_lone_surrogate_ends_nothing():
    page = page_of("half \ud800 pair")

    assert page.term_lengths.tolist() == [4, 1, 4]
    assert (page.term_bits & PLAIN).tolist() == [PLAIN, 0, PLAIN]


def test_symbols_are_punctuation_of_any_script_and_controls():
    page = page_of("a . 。 … \x07 中 + 5")

    assert ((page.term_bits & SYMBOL) > 0).tolist() == [False, True, True, True, True, False, True, False]
