"""The tables of docs/privacy.md are those of the committed raw result, and say that no proof is above its budget."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks" / "results" / "privacy-attacks-cpu-2cores-busy.json").read_text())["rows"]


def lines(rows=ROWS):
    """Each row of the raw result as the page writes it."""
    for row in rows:
        if row["attack"] == "inversion":
            lists = (row[key] / row["chance"] for key in ("recall", "any_word", "commonest", "absent"))
            times = " | ".join(f"{one:.2f}" for one in lists)
            yield f"| {row['defence']} | {row['clients']} | {row['recall']:.3f} | {times} |"
        elif row["attack"] == "property":
            yield f"| {row['defence']} | {row['clients']} | {row['auc']:.2f} |"
        elif row["attack"] == "membership":
            bits = " / ".join(f"{row['exposure_bits'][times]:.1f}" for times in ("1", "4", "16"))
            told = f"{row['auc']:.2f} | {row['found_at_1_percent']:.3f} | {bits}"
            yield f"| {row['defence']} | {row['members']} | {told} |"
        else:
            quoted = "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
            yield f"| {row['defence']} | {row['right']} of {row['guesses']} | {row['proved_epsilon']:.2f} | {quoted} |"


def test_every_row_of_the_raw_result_is_on_the_page():
    assert [line for line in lines() if line not in PAGE] == []


def test_no_proof_is_above_what_is_quoted_and_the_undefended_run_is_found_out():
    audits = [row for row in ROWS if row["attack"] == "audit"]

    assert all(row["proved_epsilon"] <= row["epsilon"] for row in audits if row["epsilon"] is not None)
    assert min(row["proved_epsilon"] for row in audits if row["epsilon"] is None) > 3.0


def test_what_a_sum_tells_is_said_where_sums_are_described_and_compared_with_what_it_must_tell():
    sums = (ROOT / "docs" / "secure_aggregation.md").read_text(encoding="utf-8")
    plain = [row for row in ROWS if row["attack"] == "inversion" and "noise" not in row["defence"]]
    said = {row["clients"]: f"{100 * row['recall']:.1f} %" for row in plain}
    chance = plain[0]["chance"]
    (thirty,) = (row for row in plain if row["clients"] == 30)

    for part in (
        f"{said[3]} of a client's tokens in a LoRA update of 3 clients, {said[10]} of 10 and {said[30]} of 30",
        f"chance is {100 * chance:.1f} % and one client alone gives {said[1]}",
    ):
        assert part in " ".join(sums.split())
    assert f"its list finds {thirty['recall'] / chance:.2f} times what chance does" in " ".join(PAGE.split())
    assert f"would find {thirty['commonest'] / chance:.2f} times chance" in " ".join(PAGE.split())
