"""Pieces become terms as spaCy's English rules split them, in linear time whatever the piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.rules.term_split import split_piece


@pytest.mark.parametrize(
    ("piece", "terms"),
    [
        ("reader", ["reader"]),
        ("(file),", ["(", "file", ")", ","]),
        ("don't", ["do", "n't"]),
        ("Don’t", ["Do", "n’t"]),
        ("its", ["its"]),
        ("cannot", ["can", "not"]),
        ("reader's", ["reader", "'s"]),
        ("well-known", ["well", "-", "known"]),
        ("a,b", ["a", ",", "b"]),
        ("lower.Upper", ["lower", ".", "Upper"]),
        ("os.path", ["os.path"]),
        ("U.S.", ["U.S."]),
        ("e.g.", ["e.g."]),
        ("end.", ["end", "."]),
        ("wait...", ["wait", "..."]),
        ("...", ["..."]),
        ("10km", ["10", "km"]),
        ("$5", ["$", "5"]),
        ("+5", ["+5"]),
        ("3*4", ["3", "*", "4"]),
        ("f(x):", ["f(x", "):"]),
        ("https://example.org/a-b/c", ["https://example.org/a-b/c"]),
        ("name@example.org", ["name@example.org"]),
        ("10.0.0.1/a-b", ["10.0.0.1/a-b"]),
        ("9am", ["9", "am"]),
        ("''", ["''"]),
        ("5°", ["5", "°"]),
        ("caf\u00e9!", ["caf\u00e9", "!"]),
        ("&", ["&"]),
        ("", []),
    ],
)
def test_a_piece_is_split_as_the_published_thresholds_count(piece, terms):
    assert split_piece(piece) == terms


@given(
    st.text(st.characters(exclude_categories=["Zs", "Zl", "Zp"]), max_size=40).filter(
        lambda text: text.split() == [text]
    )
)
def test_terms_together_are_the_piece(piece):
    terms = split_piece(piece)

    assert "".join(terms) == piece
    assert all(terms)


@pytest.mark.quick_cases("(", "a.", "1+", "://")
@pytest.mark.parametrize("unit", ["(", ")", ".", "a.", "@", ":", "a-", "'", ":)", "1+", "://", "x.y@"])
def test_a_piece_of_many_characters_is_split(unit):
    piece = unit * (200_000 // len(unit))

    assert "".join(split_piece(piece)) == piece
