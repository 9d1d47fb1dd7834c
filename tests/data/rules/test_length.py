"""Documents outside of the borders are dropped, with what was measured."""

import pytest
from pydantic import ValidationError

from phalanx.data.rules import Drop, LengthConfig, Page, RuleReason, make_rule
from phalanx.data.sources import Document


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abc", None),
        ("ab", Drop(RuleReason("characters", 2, 3))),
        ("abcde", None),
        ("abcdef", Drop(RuleReason("characters", 6, 5))),
    ],
)
def test_a_border_is_allowed_itself(text, found):
    rule = make_rule(LengthConfig(min_characters=3, max_characters=5))

    assert rule.judge_page(Page(Document("a", text), "books")) == found


def test_borders_that_drop_everything_are_refused():
    with pytest.raises(ValidationError, match="drops everything"):
        LengthConfig(min_characters=3, max_characters=2)


@pytest.mark.parametrize(
    ("text", "found"),
    [("a b", None), ("a", Drop(RuleReason("words", 1, 2))), ("a b\nc d", Drop(RuleReason("words", 4, 3)))],
)
def test_words_have_borders_of_their_own(text, found):
    rule = make_rule(LengthConfig(min_words=2, max_words=3))

    assert rule.judge_page(Page(Document("a", text), "books")) == found


def test_borders_of_words_that_drop_everything_are_refused():
    with pytest.raises(ValidationError, match="max_words=2 is below min_words=3"):
        LengthConfig(min_words=3, max_words=2)
