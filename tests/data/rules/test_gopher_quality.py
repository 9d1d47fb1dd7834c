"""What does not read like prose is dropped by the first border that it breaks."""

import pytest
from made_pages import HONEST, page_of
from pydantic import ValidationError

from phalanx.data.rules import Drop, GopherQualityConfig, RuleReason, make_rule

WORDS = "have "


def judge(text, **settings):
    return make_rule(GopherQualityConfig(**settings)).judge_page(page_of(text))


def test_prose_passes():
    assert judge(HONEST) is None


def test_a_border_is_allowed_itself_and_punctuation_is_no_word():
    assert judge("the and reader , . " * 10, min_words=30, min_alphabetic=0.6) is None
    assert judge("the and reader , . " * 10, min_words=31) == Drop(RuleReason("words", 30, 31))
    assert judge("the and reader , . " * 10, min_words=1, max_words=29) == Drop(RuleReason("words", 30, 29))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", RuleReason("words", 0, 50)),
        ("   \n\n", RuleReason("words", 0, 50)),
        ("it is " * 30, RuleReason("mean_length", 2.0, 3.0)),
        ("encyclopaedia " * 60, RuleReason("mean_length", 13.0, 10.0)),
        ("the and reader # " * 20, RuleReason("hashes", 0.25, 0.1)),
        ("the and reader of… " * 20, RuleReason("ellipses", 0.2, 0.1)),
        (
            "the reader and words have it\n" * 1 + "- the reader and words have it\n" * 19,
            RuleReason("bullet_lines", 0.95, 0.9),
        ),
        ("the and of 1234 5678 " * 20, RuleReason("alphabetic", 0.6, 0.8)),
        ("lire écrire comprendre " * 20, RuleReason("stop_words", 0, 2)),
        ("lire the comprendre " * 20, RuleReason("stop_words", 1, 2)),
    ],
)
def test_the_first_broken_border_is_told_with_its_value(text, reason):
    assert judge(text) == Drop(reason)


def test_lines_that_end_with_an_ellipsis_are_counted():
    text = "a reader of the many lines that have words in them and also some more ...\n" * 2 + HONEST.replace(
        "\n\n", "\n"
    )

    assert judge(text, max_symbols=1.0, max_ellipsis_lines=2 / 7) is None
    assert judge(text, max_symbols=1.0, max_ellipsis_lines=0.28) == Drop(RuleReason("ellipsis_lines", 2 / 7, 0.28))


@pytest.mark.parametrize(
    "settings",
    [{"min_words": 2, "max_words": 1}, {"min_mean_length": 5.0, "max_mean_length": 4.0}, {"stop_words": ("a",)}],
)
def test_borders_that_drop_everything_are_refused(settings):
    with pytest.raises(ValidationError, match=r"raise max_|stop_words"):
        GopherQualityConfig(**settings)
