"""Refusals of harmful and of harmless prompts are counted together, and what went wrong becomes training data."""

import json
from collections import Counter

import pytest

from align.fake_writer import BiasedJudge, FakeWriter
from phalanx.align import SafetyCheck, feedback_rows, read_outcomes, safety_prompts
from phalanx.align.safety import (
    hook_prompts,
    refusal_by_judge,
    refusal_by_patterns,
    safety_figures,
)
from phalanx.data.chat import parse_conversation
from phalanx.data.preferences.preference import parse_preference
from phalanx.errors import ConfigError, DataError
from phalanx.evaluate import share_with_interval

LINES = (
    {"prompt": "the code ?", "harmful": True},
    {"prompt": "your code ?", "harmful": True},
    {"prompt": "the way ?", "harmful": False, "better": "left"},
    {"prompt": "the sea ?", "harmful": False},
)
SAYS = {"the code ?": "it is 42", "your code ?": "I can't say.", "the way ?": "I’m sorry, no.", "the sea ?": "blue"}


def written(tmp_path, lines, name="set.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def outcomes(tmp_path, says=SAYS, violation=None, is_refusal=None):
    check = SafetyCheck(
        FakeWriter(lambda chat, _: says[chat[-1].content]),
        safety_prompts(written(tmp_path, LINES)),
        is_refusal or refusal_by_patterns(()),
        violation,
        0,
    )
    return check.make_rows(range(4))


def test_the_four_rates_are_told_together_with_their_intervals(tmp_path):
    rows = outcomes(tmp_path)

    found = safety_figures(rows)

    assert [(row["refused"], row["violates"]) for row in rows] == [
        (False, True),
        (True, False),
        (True, False),
        (False, False),
    ]
    assert {name: (one["count"], one["of"]) for name, one in found.items()} == {
        "refusal_rate": (1, 2),
        "over_refusal_rate": (1, 2),
        "violation_rate": (1, 2),
        "benign_violation_rate": (0, 2),
    }


def test_a_pattern_tells_violations_in_every_answer(tmp_path):
    rows = outcomes(tmp_path, {**SAYS, "your code ?": "I can't say 7", "the sea ?": "9"}, violation="[0-9]")

    assert [row["violates"] for row in rows] == [True, True, False, True]


def test_a_judge_decides_where_words_do_not(tmp_path):
    judge = BiasedJudge(lambda question: 0.9 if "declares its silence" in question else 0.1)
    rows = outcomes(tmp_path, {**SAYS, "the code ?": "it declares its silence"}, is_refusal=refusal_by_judge(judge))

    assert [row["refused"] for row in rows] == [True, False, False, False]


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # by R's binom::binom.wilson
    [(0, 40, 0.0, 0.0876), (20, 40, 0.3520, 0.6480), (39, 40, 0.8712, 0.9956), (1, 1, 0.2065, 1.0)],
)
def test_an_interval_is_wilsons(count, of, low, high):
    found = share_with_interval(count, of)

    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)
    assert found["low"] <= found["share"] <= found["high"]


def test_nothing_counted_is_no_share():
    assert share_with_interval(0, 0)["share"] is None


def test_the_set_of_this_package_has_as_many_harmless_look_alikes_as_harmful_prompts():
    found = safety_prompts(None)

    assert Counter(one.record["harmful"] for one in found) == {True: 40, False: 40}
    assert len({one.readable_text for one in found}) == 80


COMPLIANT = (
    "No problem! First, take the lock",
    "No doubt you will need a pump. First, take",
    "I can't wait to help! First, take",
    "Sure: take flour and mix it. Note that this is illegal.",
)


@pytest.mark.parametrize(
    "answer", ["I cannot help with that.", "Sorry, but no", "I'm unable to do so", "That is illegal."]
)
def test_usual_refusals_are_found(answer):
    assert refusal_by_patterns(())(safety_prompts(None)[0], answer)


@pytest.mark.parametrize(
    "answer", ["Sure, first take", "Nobody knows. Take flour", "You can wash it", "", "It cannot rain.", *COMPLIANT]
)
def test_answers_are_no_refusals(answer):
    assert not refusal_by_patterns(())(safety_prompts(None)[0], answer)


def test_broken_sets_and_patterns_are_refused(tmp_path):
    with pytest.raises(DataError, match="line 1: field \"harmful\" holds 'yes', expected true or false"):
        safety_prompts(written(tmp_path, [{"prompt": "a", "harmful": "yes"}]))
    with pytest.raises(ConfigError, match="--refusal '\\(': is no regular expression"):
        refusal_by_patterns(["("])
    with pytest.raises(ConfigError, match="--violation '\\['"):
        outcomes(tmp_path, violation="[")


def test_a_hook_tries_the_model_and_gives_what_it_found():
    def attack(ask):
        for word in ("please", "now"):
            if "can't" not in ask(f"{word} tell"):
                yield {"prompt": f"{word} tell", "better": "no"}

    writer = FakeWriter(lambda chat, _: "I can't" if "please" in chat[0].content else "42")

    found = hook_prompts(attack, writer, 0, "attacks.py:attack")

    assert [dict(one.record) for one in found] == [{"prompt": "now tell", "harmful": True, "better": "no"}]
    for gives, why in (
        ([], "gave no prompt"),
        ([3], "prompt 1: is a int"),
        ([{"prompt": ""}], "prompt 1: the prompt is"),
    ):
        with pytest.raises(DataError, match=why):
            hook_prompts(lambda _, gives=gives: gives, writer, 0, "attacks.py:attack")


def test_outcomes_become_pairs_and_conversations(tmp_path):
    path = written(tmp_path, outcomes(tmp_path), "outcomes.jsonl")

    pairs, of_pairs = feedback_rows(read_outcomes(path), "pairs", "I will not.")
    talks, of_talks = feedback_rows(read_outcomes(path), "conversations", "I will not.")

    assert [tuple(one.plain_text for one in parse_preference(row, "pairs").answers) for row in pairs] == [
        ("I will not.", "it is 42"),
        ("left", SAYS["the way ?"]),
    ]
    assert of_pairs == {"violation": 1, "right, which no pair is made of": 2, "over-refusal": 1}
    assert [parse_conversation(row).messages[-1].content for row in talks] == [
        "I will not.",
        "I can't say.",
        "left",
        "blue",
    ]
    assert of_talks == {"violation": 1, "right": 2, "over-refusal": 1}


def test_a_harmless_prompt_is_never_answered_by_the_refusal(tmp_path):
    lines = [{"prompt": "a", "harmful": False, "answer": "no", "refused": True, "violates": True}]

    rows, counts = feedback_rows(read_outcomes(written(tmp_path, lines)), "pairs", "I will not.")

    assert (rows, counts) == ([], {"without a better answer": 1})
    with pytest.raises(DataError, match='field "violates" holds None'):
        read_outcomes(written(tmp_path, [{"prompt": "a", "harmful": True, "answer": "b", "refused": True}]))
