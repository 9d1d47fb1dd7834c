"""Of equal texts the first one stays, and the others name it."""

from made_pages import HONEST, TextsInMemory, decide

from phalanx.data.rules import Drop, ExactDuplicatesConfig, RuleReason, make_rule

RULE = make_rule(ExactDuplicatesConfig())


def test_different_texts_pass():
    assert decide(RULE, [HONEST, HONEST + " ", HONEST.lower(), ""]) == {}
    assert decide(RULE, []) == {}


def test_later_copies_are_dropped_and_name_the_first():
    found = decide(RULE, ["a", "b", "a", "", "b", ""])

    assert found == {
        2: Drop(RuleReason("equal_to", "document 0")),
        4: Drop(RuleReason("equal_to", "document 1")),
        5: Drop(RuleReason("equal_to", "document 3")),
    }


def test_two_ways_to_write_one_character_are_equal():
    assert list(decide(RULE, ["cafe\u0301", "caf\u00e9"])) == [1]


def test_a_text_with_a_lone_surrogate_is_counted_like_any_other():
    assert list(decide(RULE, ["\ud800", "\ud801", "\ud800"])) == [2]


def test_documents_without_a_copy_are_not_read_again():
    texts = TextsInMemory(["a", "b"])

    assert (
        list(RULE.decide_outcomes([RULE.mark_page(texts.read_page(0)), RULE.mark_page(texts.read_page(1))], texts))
        == []
    )
    assert texts.reads == 2
