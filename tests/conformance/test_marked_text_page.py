"""The raw results of marks and filters hold what their pages promise."""

import json

import pytest
from measured_tables import RESULTS
from serving_tables import FILTERS, MARKS, part

from phalanx.serve.filters.table import INPUTS, OUTPUTS


@pytest.fixture(scope="module")
def marks():
    return json.loads((RESULTS / MARKS).read_text(encoding="utf-8"))


def test_draws_over_100_000_keys_have_the_models_distribution(marks):
    rows = {(row["what"], row["temperature"]): row for row in part(marks, "marginal")}

    assert rows.pop(("text without deduplication", 1.0))["p_value"] < 1e-6
    assert len(rows) == 3
    assert all(row["p_value"] > 1e-3 and row["keys"] == 100_000 for row in rows.values())


def test_alarms_on_10_000_documents_are_within_the_interval(marks):
    (row,) = [row for row in part(marks, "false alarms") if (row["kind"], row["way"]) == ("all", "deduplicated")]

    assert row["documents"] == 10_000
    # 95 % of benches, at 1 %
    assert 80 <= row["at_0.01"] <= 120
    assert row["at_1e-06"] == 0


def test_marked_text_is_found_and_is_as_likely_as_plain_text(marks):
    rows = {row["arm"]: row for row in part(marks, "quality")}

    assert all(row["found"] == 0 for arm, row in rows.items() if arm.startswith("plain"))
    for temperature in ("1", "0.7"):
        row = rows[f"marked, temperature {temperature}"]
        assert row["found"] >= 0.9 * row["texts"]
        assert abs(row["gap"]) <= 2 * row["gap_error"]


def test_the_mark_costs_less_than_a_hundredth_of_a_token(marks):
    (model,) = part(marks, "model")
    single = part(marks, "cost")[0]

    for other in ("seeded", "torch"):
        assert single["marked_ms"] - single[f"{other}_ms"] <= 0.01 * model["ms_per_token"]


def test_every_filter_was_measured_and_those_that_refuse_touch_no_clean_text():
    rows = json.loads((RESULTS / FILTERS).read_text(encoding="utf-8"))["rows"]
    touched = {(row["way"], row["filter"]): row["touched"] for row in rows if "touched" in row}

    assert touched.keys() == {("input", name) for name in (*INPUTS, "all")} | {
        ("output", name) for name in (*OUTPUTS, "all")
    }
    refusing = ("terminal_controls", "hidden_characters", "secrets", "canaries", "denied_topics", "verbatim")
    assert [touched["output", name] for name in refusing] == [0] * len(refusing)
    assert touched["input", "all"] == 0
