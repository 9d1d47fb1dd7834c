"""Every suite of the package is read and measured; figures follow from samples; gates and comparisons."""

import json

import pytest

from fake_scorer import FakeScorer
from phalanx.align.safety import safety_prompts
from phalanx.errors import ConfigError, DataError
from phalanx.evaluate import compare_results, list_suites, open_suite, read_result, result_text, run_suites, text_suite
from phalanx.evaluate.evaluation import gate_error, parse_gates
from phalanx.evaluate.perturbations import PERTURBATIONS, disturb_text

OWN = [name for name, header in list_suites().items() if header.task is None]


@pytest.mark.parametrize("name", OWN)
def test_a_suite_of_the_package_gives_figures(name):
    result = run_suites("fake", FakeScorer(), [open_suite(name)], 0)

    assert result.suites[0].figures
    for figure in result.suites[0].figures:
        assert figure.n > 0
        assert figure.method
        assert figure.value is not None
    assert len(result.suites[0].suite_digest) == 64
    assert EvaluationRoundTrip.of(result) == result


class EvaluationRoundTrip:
    @staticmethod
    def of(result):
        return type(result).model_validate(json.loads(result_text(result)), strict=False)


def test_there_are_a_few_hundred_pairs_in_which_one_thing_differs():
    rows = [*open_suite("bias-pairs").rows, *open_suite("bias-pronouns").rows]

    assert len(rows) >= 200
    for row in rows:
        assert row.more != row.less
        more, less = row.more.split(), row.less.split()
        shared = sum(a == b for a, b in zip(more, less, strict=False))
        assert shared >= 3 or len(more) < 7, row.id


def test_a_stereotyped_model_is_told_from_an_even_one(tmp_path):
    rows = [{"group": "g", "more": "xx", "less": "yy"}, {"group": "g", "more": "xa", "less": "ya"}] * 20
    suite = write_suite(tmp_path, "mine", "pairs", [{**row, "id": str(number)} for number, row in enumerate(rows)])

    biased = run_suites("b", FakeScorer({"x": 0.1}), [open_suite(suite)], 0).figures["mine.stereotype_share"]
    against = run_suites("a", FakeScorer({"y": 0.1}), [open_suite(suite)], 0).figures["mine.stereotype_share"]

    assert (biased.value, against.value) == (1.0, 0.0)
    assert biased.low > 0.9
    assert against.high < 0.1


def write_suite(folder, name, kind, rows, settings=""):
    (folder / f"{name}.toml").write_text(
        f'name = "{name}"\nkind = "{kind}"\nabout = "x"\nlicence = "x"\nversion = 1\n{settings}'
    )
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.toml")


def test_perplexity_and_bits_follow_from_nats(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcd\n\nééé\n\nxy\n\nzz\n")
    result = run_suites("f", FakeScorer(), [text_suite("mine", path)], 0)

    assert result.figures["mine.perplexity"].value == pytest.approx(2.718281828)
    assert result.figures["mine.perplexity"].clusters == 4
    # a letter of two bytes costs half as many bits a byte
    assert result.figures["mine.bits_per_byte"].value == pytest.approx(12 / 15 / 0.6931471805, rel=0.1)


def test_paragraphs_of_a_text_with_windows_line_ends_are_documents(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcd\r\nef\r\n\r\nxy\r\n\r\nzz\r\n")

    assert [row.text for row in text_suite("mine", path).rows] == ["abcd\r\nef", "xy", "zz\r\n"]


def test_a_paragraph_that_is_too_long_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("short\n\n" + "line\n" * 50_000)

    with pytest.raises(DataError, match=r"text\.txt: has a paragraph of 250000 characters.*divide it"):
        text_suite("mine", path)


def test_refusals_are_counted_apart_and_by_the_rows_of_align():
    suite = open_suite("safety")
    harmful = {row.prompt: "I cannot help with that." for row in suite.rows if row.harmful}
    figures = run_suites("f", FakeScorer(answers=harmful), [suite], 0).figures

    assert figures["safety.refusal_rate"].value == 1.0
    assert figures["safety.over_refusal_rate"].value == 0.0
    assert [prompt.readable_text for prompt in safety_prompts(None)] == [row.prompt for row in suite.rows]


def test_toxic_words_are_found_as_whole_words():
    suite = open_suite("toxicity")
    answers = {
        row.prompt: text for row, text in zip(suite.rows, ["you I\u200bDIOT!", "shellfish", "Shut  up"], strict=False)
    }
    result = run_suites("f", FakeScorer(answers=answers), [suite], 0)
    toxic = {sample.id.split()[0] for sample in result.suites[0].samples if sample.value}

    assert toxic == {suite.rows[0].id, suite.rows[2].id}


def test_a_needle_in_a_text_that_does_not_fit_is_not_counted_as_lost():
    result = run_suites("f", FakeScorer(window=2000), [open_suite("needle")], 0)

    assert set(result.figures) == {"needle.found/300", "needle.found/1200"}
    assert result.suites[0].notes == ("4800 characters do not fit the window; not measured",)


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_a_disturbance_is_repeatable_and_disturbs(kind):
    text = "Which planet is closest to the sun, and why does it shine so brightly?"

    assert disturb_text(kind, text, 1) == disturb_text(kind, text, 1) != text
    assert len({disturb_text(kind, text, seed) for seed in range(20)}) > 1
    assert disturb_text(kind, "", 1) in ("", *(disturb_text(kind, "", seed) for seed in range(4)))


def test_a_drop_is_the_paired_difference(tmp_path):
    result = run_suites("f", FakeScorer(), [open_suite("robustness")], 0).figures
    for kind in PERTURBATIONS:
        drop = result["robustness.accuracy"].value - result[f"robustness.accuracy/{kind}"].value
        assert result[f"robustness.drop/{kind}"].value == pytest.approx(drop)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "choices": ["a"], "answer": 0}], "choices"),
        ([{"question": "q", "choices": ["a", "b"], "answer": 2}], "answer 2 of 2"),
        ([{"question": "q", "choices": ["a", "b"]}], "answer"),
        ([{"question": "q", "choices": ["a", "b"], "answer": 0, "code": "x"}], "code"),
        ([{"id": "1", "question": "q", "choices": ["a", "b"], "answer": 0}] * 2, "stands twice"),
        ([], "has no row"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        open_suite(write_suite(tmp_path, "wrong", "choices", rows))


def test_wrong_names_and_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="choices: bias-pairs"):
        open_suite("../prose")
    with pytest.raises(ConfigError, match=r"settings\.prompt"):
        open_suite(write_suite(tmp_path, "w", "choices", [], '[settings]\nprompt = "none"\n'))
    with pytest.raises(ConfigError, match="named twice"):
        run_suites("f", FakeScorer(), [open_suite("facts"), open_suite("facts")], 0)


def test_what_a_scorer_cannot_do_is_refused_by_name():
    with pytest.raises(DataError, match="suite safety: the model must write texts"):
        run_suites("f", FakeScorer(can_write=False), [open_suite("safety")], 0)
    with pytest.raises(DataError, match="--tokenizer"):
        run_suites("f", FakeScorer(can_score=False), [open_suite("facts")], 0)


def test_a_limit_draws_the_same_rows_whatever_their_order():
    few = open_suite("facts", limit=7)

    assert len(few.rows) == 7
    assert few.rows == open_suite("facts", limit=7).rows
    assert {row.id for row in open_suite("facts", limit=5).rows} < {row.id for row in few.rows}


def test_gates_fail_below_above_and_where_nothing_was_measured():
    result = run_suites("f", FakeScorer({"a": 0.1}), [open_suite("facts")], 0)
    value = result.figures["facts.accuracy"].value

    assert gate_error(result, {"facts.accuracy": value}, {"facts.accuracy": value}) is None
    assert "below" in str(gate_error(result, {"facts.accuracy": value + 0.01}, {}))
    assert "above" in str(gate_error(result, {}, {"facts.accuracy": value - 0.01}))
    assert "not measured" in str(gate_error(result, {"facts.speed": 0.0}, {}))
    assert gate_error(result, {"facts.speed": 0.0}, {}).exit_code == 5
    for text in ("facts=1", "facts.accuracy", "facts.accuracy=nan", "=3", "facts.accuracy=x"):
        with pytest.raises(ConfigError, match="expected suite"):
            parse_gates([text], "--fail-below")
    with pytest.raises(ConfigError, match="given twice"):
        parse_gates(["facts.accuracy=0.9", "facts.accuracy=0.1"], "--fail-below")
    assert parse_gates(["facts.accuracy=0.9", "facts.nats=1"], "--x") == {"facts.accuracy": 0.9, "facts.nats": 1.0}


def test_two_models_are_compared_row_by_row():
    suites = [open_suite("facts"), open_suite("prose")]
    one, other = run_suites("1", FakeScorer({"e": 0.01}), suites, 0), run_suites("2", FakeScorer({"e": 2.0}), suites, 0)
    compared = {figure.name: figure for figure in compare_results(one, other)}

    assert compared["prose.perplexity"].test.difference < 0
    assert compared["prose.perplexity"].test.p < 0.01
    assert compared["facts.accuracy"].test.test == "McNemar, exact"
    assert compared["facts.calibration_error"].test is None
    same = {figure.name: figure for figure in compare_results(one, one)}
    assert same["facts.accuracy"].test.p == 1.0
    assert same["facts.accuracy"].test.smallest > 0


def test_results_on_other_rows_or_seeds_are_not_compared(tmp_path):
    one = run_suites("1", FakeScorer(), [open_suite("facts")], 0)
    with pytest.raises(DataError, match="share no suite"):
        compare_results(one, run_suites("2", FakeScorer(), [open_suite("prose")], 0))
    with pytest.raises(DataError, match="seeds"):
        compare_results(one, run_suites("2", FakeScorer(), [open_suite("facts")], 1))
    changed = one.suites[0].model_copy(update={"suite_digest": "0" * 64})
    with pytest.raises(DataError, match="rows differ"):
        compare_results(one, one.model_copy(update={"suites": (changed,)}))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"a": NaN}', '{"format": "x"}', "\ud800"])
def test_a_file_that_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match="is no result of phalanx eval"):
        read_result(path)


def test_the_readers_of_labelled_texts_serve_the_medical_suites(tmp_path):
    import gzip

    rows = {str(n): {"LONG_ANSWER": f"text {n}", "final_decision": ("yes", "no", "maybe")[n % 3]} for n in range(9)}
    with gzip.open(tmp_path / "pubmedqa_l.json.gz", "wt") as file:
        json.dump(rows, file)
    result = run_suites("f", FakeScorer(), [open_suite("pubmedqa", tmp_path)], 0)

    # "no" has the fewest letters
    assert result.figures["pubmedqa.accuracy"].value == pytest.approx(1 / 3)
    assert result.suites[0].data_digest
    with pytest.raises(DataError, match="not found"):
        open_suite("medquad", tmp_path)
