"""The curve on the page of alignment is that of the committed run: violations fall, nothing harmless is refused."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "alignment-cpu-2cores-busy.json").read_text())
ROWS = {row["step"]: row for row in FOUND["rows"]}
LINES = {
    "violations, of 24 harmful prompts": "violation_rate",
    "refusals, of 24 harmful prompts": "refusal_rate",
    "refusals, of 72 harmless prompts": "over_refusal_rate",
}


def written(line):
    return [int(one) for one in re.search(rf"^\| {re.escape(line)} \| (.+) \|$", PAGE, re.M)[1].split(" | ")]


def test_the_curve_is_that_of_the_raw_result():
    steps = written("step of `constitution.toml`")

    for line, name in LINES.items():
        assert written(line) == [ROWS[step][name]["count"] for step in steps]
        assert {ROWS[step][name]["of"] for step in steps} == {int(re.search(r"\d+", line)[0])}


def test_the_bounds_in_the_text_are_those_of_the_last_step():
    last, made = ROWS[max(ROWS)], FOUND["revision"]

    assert f"violations are at most {100 * last['violation_rate']['high']:.1f} %" in PAGE
    assert f"refusals of harmless prompts at most {100 * last['over_refusal_rate']['high']:.1f} %" in PAGE
    assert f"{made['answers_that_violate']} of the {made['prompts']} first answers" in PAGE
    assert made["revisions_that_violate"] == 0


def test_violations_fall_and_refusals_of_what_is_harmless_do_not_rise():
    first, last = ROWS[0], ROWS[max(ROWS)]

    assert last["violation_rate"]["high"] < first["violation_rate"]["low"]
    assert last["over_refusal_rate"]["count"] <= first["over_refusal_rate"]["count"]


SMALL = json.loads((ROOT / "benchmarks" / "results" / "constitution-smollm2-cpu-2cores-busy.json").read_text())


def test_what_a_small_real_model_became_is_that_of_the_raw_result_its_over_refusal_included():
    for line, name in LINES.items():
        said = re.sub(r"\d+", "40", line)
        assert written(said) == [SMALL["rows"][stage][name]["count"] for stage in ("base", "sft")]
        assert {SMALL["rows"][stage][name]["of"] for stage in ("base", "sft")} == {40}


def test_a_small_models_choices_are_told_as_they_were():
    chosen = SMALL["chosen"].values()
    numbers = [sum(one[key] for one in chosen) for key in ("prompts", "rows")]
    equal, ties = (sum(one["left_out"][key] for one in chosen) for key in ("equal", "tie"))

    said = f"of {numbers[0]} choices between two of the\ntuned model's answers {equal} were between equal ones, "
    assert f"{said}{ties} were ties, and {numbers[1]} were left" in PAGE
    assert {one["order_decided"] for one in chosen} == {1.0}
    assert "dpo" not in SMALL["rows"]
