"""Which rows hold a document: exactly those in which any of its tokens is read."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.packing import BestFitRows, TokenSplit, Windows


def split_of(sizes: list[int]) -> TokenSplit:
    """Documents of so many tokens, each with a number that no other token has, and the end of text behind it."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)])
    tokens = np.arange(1, int(starts[-1]) + 1, dtype=np.uint32)
    tokens[starts[1:] - 1] = 0
    return TokenSplit(tokens, 0, lambda: starts, lambda name: np.zeros(len(sizes)))


@pytest.mark.parametrize("make", [Windows, BestFitRows])
@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), length=st.integers(2, 16))
def test_exactly_the_rows_that_read_a_document_hold_it(make, sizes: list[int], length: int) -> None:
    split = split_of(sizes)
    rows, starts = make(split, length), split.starts().tolist()
    blocks = [rows.read_rows([number]) for number in range(rows.num_rows)]

    for start, stop in itertools.pairwise(starts):
        own = set(split.tokens[start : stop - 1].tolist())
        read = [n for n, block in enumerate(blocks) if own & {*block.ids.flat, *block.labels.flat}]

        assert set(read) <= set(rows.rows_holding(start, stop).tolist())
        assert rows.rows_holding(start, stop - 1).tolist() == read


@pytest.mark.parametrize("make", [Windows, BestFitRows])
def test_no_token_is_held_by_no_row(make) -> None:
    rows = make(split_of([5, 5]), 4)

    assert rows.rows_holding(3, 3).tolist() == []
