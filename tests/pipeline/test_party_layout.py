"""A party's layout speaks the words of [parallel], and refuses the ones that a party cannot carry."""

import pytest
from pydantic import ValidationError

from phalanx.parallel import ParallelConfig
from phalanx.pipeline import PartyLayout
from phalanx.pipeline.party_layout import NOT_FOR_PARTIES
from phalanx.pipeline.tolerance.numeric_class import local_numeric_class

OF_BOTH = {name: ParallelConfig.model_fields[name] for name in PartyLayout.model_fields}


def test_every_word_of_parallel_is_carried_or_refused_with_a_reason():
    assert set(PartyLayout.model_fields) | set(NOT_FOR_PARTIES) == set(ParallelConfig.model_fields)
    assert set(PartyLayout.model_fields).isdisjoint(NOT_FOR_PARTIES)
    assert {name: one.default for name, one in OF_BOTH.items()} == {
        name: one.default for name, one in PartyLayout.model_fields.items()
    }


@pytest.mark.parametrize("word", NOT_FOR_PARTIES)
def test_a_word_that_is_not_for_parties_is_refused_even_with_its_default(word):
    with pytest.raises(ValidationError, match=f"{word} is not allowed for the ranks of one party"):
        PartyLayout.model_validate({word: ParallelConfig.model_fields[word].default})


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"dp": 2, "zero": 3}, "rank 0 of a party needs all of them"),
        ({"tp": 2, "zero": 1}, "but there is one copy; raise dp"),
        ({"sequence_parallel": True}, "needs tensor parallel ranks"),
        ({"dp": 0}, "greater than or equal to 1"),
    ],
)
def test_a_layout_that_cannot_be_carried_is_refused(layout, reason):
    with pytest.raises(ValidationError, match=reason):
        PartyLayout.model_validate(layout)


def test_a_layout_says_what_it_is_in_the_numeric_class():
    layout = PartyLayout(dp=2, cp=2, context="ring", zero=2)

    described = local_numeric_class("cpu", layout)

    assert (described.ranks, described.layout) == (4, "dp=2 cp=2 context=ring zero=2")
    assert local_numeric_class("cpu", PartyLayout()) == local_numeric_class("cpu")
