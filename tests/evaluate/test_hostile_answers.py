"""Answers are data. The attacker is a model, or whoever trained it: its answers reach the grader and the terminal."""

import json
import time
from fractions import Fraction

import pytest

from phalanx.config import is_plain
from phalanx.evaluate.answers import list_words, parse_choice, parse_json_object, parse_number
from phalanx.evaluate.constraints import check_constraint
from phalanx.evaluate.evaluation import EvaluationResult, SampleRecord, SuiteResult, render_markdown
from phalanx.evaluate.inspect_log import inspect_log
from phalanx.evaluate.measures import Sample
from phalanx.evaluate.refusals import is_plain_refusal
from phalanx.evaluate.suite import InstructionRow
from phalanx.report.evaluation_page import render_evaluation_page

MARKER = "phalanx_scorer_was_here"
PAYLOADS = {
    # inspect_ai 4361, slime 1586, verl 7500 and sieval 77 evaluated such answers
    "eval": f"__import__('pathlib').Path('{MARKER}').touch()",
    "sympy parse_expr": f"().__class__.__base__.__subclasses__()[0].__globals__['os'].system('touch {MARKER}')",
    "sympify through N": f"N(\"exec(\\\"open('{MARKER}','w')\\\")\")",
    "tower of powers": "the answer is 9**9**9**9**9",
    "factorial": "the answer is factorial(10**10)!",
    "endless digits": "the answer is " + "9" * 2_000_000,
}


@pytest.fixture
def row():
    kinds = [
        {"kind": "number", "value": "4"},
        {"kind": "choice", "letter": "B"},
        {"kind": "json", "keys": ["a"]},
        {"kind": "words", "min": 1, "max": 3},
        {"kind": "sentences", "max": 1},
        {"kind": "includes", "words": ["four"]},
        {"kind": "excludes", "words": ["five"]},
        {"kind": "ends", "text": "."},
        {"kind": "lower_case"},
    ]
    return InstructionRow.model_validate({"prompt": "?", "constraints": kinds}, strict=False)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_the_six_scorer_payloads_do_nothing(payload, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.process_time()

    number = parse_number(payload)
    parse_choice(payload, 4)
    parse_json_object(payload)
    is_plain_refusal(payload)
    met = [check_constraint(constraint, payload) for constraint in row.constraints]

    assert number is None or abs(number) < 10**6
    assert not met[0]
    assert not list(tmp_path.iterdir())
    # work by the size of the answer, not by its meaning; a tower of powers would take for ever
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "a" * 1_000_000 + "!",
        "1," * 500_000,
        "i can not " * 100_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        "[" * 50_000,
        "." * 200_000,
        "as an ai " + "x" * 1_000_000,
    ],
    ids=["brackets", "letters", "commas", "refusals", "objects", "lists", "stops", "gap"],
)
def test_long_answers_are_read_in_bounded_time(text, row):
    began = time.process_time()

    parse_number(text)
    parse_choice(text, 26)
    assert parse_json_object(text) is None
    list_words(text)
    is_plain_refusal(text)
    for constraint in row.constraints:
        check_constraint(constraint, text)

    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42),
        ("12 apples and 3 pears make 15", 15),
        ("-3.50", Fraction(-7, 2)),
        ("$1,234.5", Fraction(2469, 2)),
        ("\u22127", -7),
        ("3/4", Fraction(3, 4)),
        ("1/0", None),
        ("none at all", None),
        ("2^10", None),
        ("2^-10", None),
        ("2**10", None),
        ("3!", None),
        ("1e9", None),
        ("0x10", None),
        ("\u0664\u0662", None),
        ("version 1.2.3", None),
    ],
)
def test_numbers_have_one_grammar(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", 1),
        ("(C)", 2),
        ("The answer is D.", 3),
        ("answer: b", 1),
        ("A or B", None),
        ("A horse, so B", 1),
        ("I do not know", None),
        ("E", None),
        ("Z" * 50, None),
    ],
)
def test_choices_have_one_grammar(text, choice):
    assert parse_choice(text, 4) == choice


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": Infinity}',
        "[1]",
        '{"a": ' + "1" * 5000 + "}",
        'x {"a": 1}',
        '{"a": 1} x',
    ],
)
def test_json_that_two_readers_read_differently_is_none(text):
    assert parse_json_object(text) is None


def test_an_empty_answer_meets_no_constraint(row):
    assert not any(check_constraint(constraint, "  \n") for constraint in row.constraints)


def test_invisible_characters_hide_no_word():
    assert list_words("id\u200biot \uff49\uff44\uff49\uff4f\uff54") == ["idiot", "idiot"]


SPOOFS = "\x1b]8;;https://evil.example\x07click\x1b]8;;\x07 \u202egnp.exe"
SPOOFS += " \u200b\x9b31m <script>alert(1)</script> | [x](http://e)"


@pytest.fixture
def spoofed():
    sample = Sample("id \x1b[2J", "c", "followed", 0.0, shown=SPOOFS)
    suite = SuiteResult(
        name="instructions",
        kind="instructions",
        version=1,
        suite_digest="0" * 64,
        num_rows=1,
        notes=("a note \x1b[31m",),
        figures=(),
        samples=(SampleRecord(**vars(sample)),),
    )
    return EvaluationResult(
        subject="dir \x1b[0m\u202e", model={"kind": "local"}, seed=0, versions={"python": "3"}, suites=(suite,)
    )


def with_figure(result):
    figure = {"metric": "followed", "value": 0.0, "low": 0.0, "high": 1.0, "n": 1, "clusters": 1, "method": "Wilson"}
    suite = SuiteResult.model_validate({**result.suites[0].model_dump(), "figures": [figure]}, strict=False)
    return result.model_copy(update={"suites": (suite,)})


def test_nothing_that_is_shown_steers_a_terminal_or_a_page(spoofed):
    result = with_figure(spoofed)

    markdown, page = render_markdown(result), render_evaluation_page(result)
    log = json.dumps(inspect_log(result, result.suites[0]), ensure_ascii=False)

    for shown in (markdown, page, log):
        assert all(is_plain(character) or character in "\n\ufffd" for character in shown)
    assert "<script>alert" not in page
    assert "[x](" not in markdown
    assert "<script" not in markdown
