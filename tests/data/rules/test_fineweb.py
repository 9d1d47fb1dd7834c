"""Lists, menus and repeated lines are dropped; running text passes."""

import pytest
from made_pages import HONEST, page_of

from phalanx.data.rules import Drop, FineWebConfig, RuleReason, make_rule

LONG = "This line has more than thirty characters and ends"


def judge(text, **settings):
    return make_rule(FineWebConfig(**settings)).judge_page(page_of(text))


@pytest.mark.parametrize("text", [HONEST, "これは文です。" * 5])
def test_running_text_passes_in_any_script(text):
    assert judge(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", RuleReason("lines", 0, 1)),
        (" \n\t\n", RuleReason("lines", 0, 1)),
        (LONG, RuleReason("ended_lines", 0.0, 0.12)),
        ("Home.\nNews.\nContact.", RuleReason("short_lines", 1.0, 0.67)),
        (f"{LONG}.\n{LONG} here.\n{LONG}.", RuleReason("repeated_line_characters", 51 / 158, 0.01)),
        (
            "averyveryverylongwordindeedyesitis.\n\n\n" * 1 + "anotherveryverylongwordindeed.it.is.\n",
            RuleReason("lines_per_term", 1.0, 0.3),
        ),
    ],
)
def test_the_first_broken_border_is_told_with_its_value(text, reason):
    assert judge(text) == Drop(reason)


def test_a_border_is_allowed_itself_and_empty_lines_do_not_count():
    text = f"{LONG}.\n\n \n{LONG} two\n{LONG} three\n{LONG} four"

    assert judge(text, min_ended_lines=0.25) is None
    assert judge(text, min_ended_lines=0.26) == Drop(RuleReason("ended_lines", 0.25, 0.26))
