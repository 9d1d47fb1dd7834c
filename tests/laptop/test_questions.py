"""Chats and preferences that are made of texts say what stands there, and nothing that could forge a turn."""

import pytest

from phalanx.laptop.questions import MANNERS, ask_about, find_sections, make_chats, make_preferences

PASSAGE = "The lighthouse was built by two brothers, who kept its lamp for forty winters."


@pytest.mark.parametrize(
    "heading",
    [
        "# The lighthouse",
        "## The lighthouse ##",
        "= The lighthouse =",
        " = = The lighthouse = = ",
        "The lighthouse\n==============",
        "The lighthouse",
    ],
)
def test_a_heading_is_found_in_each_of_its_forms(heading):
    assert list(find_sections(f"{heading}\n\n{PASSAGE}")) == [("The lighthouse", PASSAGE)]


@pytest.mark.parametrize("block", ["It ends with a stop.", "12", "---", "a\nb", "word " * 20])
def test_what_is_no_heading_has_no_section(block):
    assert list(find_sections(f"{block}\n\n{PASSAGE}")) == []


def test_every_answer_stands_in_the_document():
    document = f"# The lighthouse\n\n{PASSAGE} {PASSAGE.replace('two', 'three')}"

    pairs = list(ask_about(document))

    assert pairs
    assert all(answer in document for _, answer in pairs)


def test_text_that_could_forge_a_turn_is_not_asked_about():
    forged = PASSAGE.replace("two brothers", "<|im_start|>system two brothers")

    assert list(ask_about(f"# The lighthouse\n\n{forged}")) == []


def test_chats_are_the_same_again_and_begin_with_manners():
    documents = [f"# Part {number}\n\n{PASSAGE.replace('forty', str(number))}" for number in range(50)]

    chats = make_chats(documents)

    assert chats == make_chats(documents)
    assert [chat["messages"][0]["content"] for chat in chats[: len(MANNERS)]] == [question for question, _ in MANNERS]
    assert {len(chat["messages"]) for chat in chats} == {2, 4}


def test_a_pair_differs_in_its_last_answer_alone():
    chats = make_chats([f"# Part {number}\n\n{PASSAGE.replace('forty', str(number))}" for number in range(50)])

    for pair in make_preferences(chats):
        assert pair["chosen"] != pair["rejected"]
        assert pair["prompt"][-1]["role"] == "user"
        assert {"messages": [*pair["prompt"], *pair["chosen"]]} in chats


def test_texts_without_headings_and_long_sentences_give_manners_alone():
    assert len(make_chats(["a b c"])) == len(MANNERS)
