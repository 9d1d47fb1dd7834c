"""Best-fit packing: every token of every document once, in rows that are almost full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.packing import BestFitRows, TokenSplit, Windows
from phalanx.data.packing.rows import IGNORED, pack_best_fit
from phalanx.errors import DataError

EOS = 0


def split_of(documents: list[list[int]]) -> TokenSplit:
    """Documents of tokens above 0, each with the end of text behind it."""
    tokens = np.array([token for document in documents for token in (*document, EOS)], dtype=np.uint16)
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return TokenSplit(tokens, EOS, lambda: starts, lambda name: np.arange(len(documents), dtype=np.float64))


def plain_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Room left in each row, by the rule of the book, one piece after the other."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    return sorted(rooms)


@settings(deadline=None)
@given(capacity=st.integers(1, 40), data=st.data())
def test_pieces_are_placed_by_the_rule_of_the_book(capacity, data):
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=60))

    rows = pack_best_fit(np.array(sizes, dtype=np.int64), capacity)

    filled = np.bincount(rows, weights=sizes, minlength=0).astype(int) if sizes else np.array([], dtype=int)
    assert sorted((capacity - filled).tolist()) == plain_best_fit(sizes, capacity)


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=30), min_size=1, max_size=12),
    length=st.integers(2, 12),
)
def test_every_token_is_in_one_row_and_has_the_label_that_follows_it(documents, length):
    rows = BestFitRows(split_of(documents), length)

    block = rows.read_rows(range(rows.num_rows))

    pairs = sorted(
        (int(one), int(label))
        for one, label in zip(block.ids.ravel(), block.labels.ravel(), strict=True)
        if label != IGNORED
    )
    expected = sorted(pair for document in documents for pair in zip(document, [*document[1:], EOS], strict=True))
    assert pairs == expected
    assert (block.labels[block.ids == EOS] == IGNORED).all()
    assert (np.diff(block.documents, axis=1) >= 0).all()
    assert (block.documents[:, 0] == 0).all()


def test_a_short_document_is_never_cut_and_fills_the_row_that_fits_best():
    rows = BestFitRows(split_of([[1, 1], [2] * 6, [3], [4] * 3]), length=8)

    block = rows.read_rows(range(rows.num_rows))

    assert block.ids.tolist() == [[2, 2, 2, 2, 2, 2, 0, 0], [4, 4, 4, 0, 1, 1, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]
    assert block.documents.tolist() == [[0] * 7 + [1], [0] * 4 + [1] * 3 + [2], [0] * 2 + [1] * 6]


def test_rows_of_real_lengths_are_full():
    sizes = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).astype(np.int64).clip(2, 2048)

    rows = pack_best_fit(sizes, 2048)

    assert sizes.sum() / ((rows.max() + 1) * 2048) > 0.998


def test_a_piece_that_no_row_holds_is_refused():
    with pytest.raises(DataError, match="pieces of 3 to 9 tokens, rows of 8"):
        pack_best_fit(np.array([3, 9]), 8)


@pytest.mark.parametrize("make", [Windows, BestFitRows])
def test_the_score_of_a_row_is_the_mean_of_its_tokens_documents(make):
    split = split_of([[1] * 5, [2] * 3, [3] * 14, [4] * 2])
    rows = make(split, 6)

    lengths, numbers = rows.mean_scores("length"), rows.mean_scores("order in the corpus")

    owners = np.repeat([0, 1, 2, 3], [6, 4, 15, 3])
    tokens = np.repeat([6, 4, 15, 3], [6, 4, 15, 3])
    block = rows.read_rows(range(rows.num_rows))
    if make is Windows:
        for row in range(rows.num_rows):
            assert lengths[row] == pytest.approx(tokens[row * 6 : row * 6 + 6].mean())
            assert numbers[row] == pytest.approx(owners[row * 6 : row * 6 + 6].mean())
    else:
        whole = [row for row in range(rows.num_rows) if (block.ids[row] == 3).all()]
        assert [numbers[row] for row in whole] == [2.0] * len(whole)
        assert whole
