"""docs/verified_rollouts.md: every figure of its tables is the raw result's, and so is what its words say of them."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "verified_rollouts.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "verified-rollouts-cpu-2cores-busy.json"
FOUND = json.loads(RESULT.read_text(encoding="utf-8"))
ROWS = FOUND["rows"]


def of(what):
    return [row for row in ROWS if row["what"] == what]


def percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def honest():
    for row in of("honest"):
        worst = (f"{row[key]:.1e}" for key in ("worst_margin", "worst_logprob", "worst_sketch"))
        yield line(row["checker"], f"{row['tokens']:,}", row["accused"], row["differing"], *worst)


def attacks():
    """Lines of each attack, and of one old policy by the size of the step that it lacks."""
    few = min(row["answers"] for row in of("attack"))
    for row in of("attack"):
        shares = (percent(row[key]) for key in ("texts_that_differ", "texts_found", "of_these_found", "answers_found"))
        offences = ", ".join(f"`{offence}`" for offence in row["offences"]) or "-"
        first = f"`{row['kind']}`" if row["answers"] == few else f"{row['step_lr']:.0e}"
        yield line(first, row["way"], offences, *shares)


def cost():
    (row,) = of("cost")
    yield line("writing, CPU a token", f"{row['write_cpu_us_per_token']:.0f} µs")
    yield line("reading again, CPU a token", f"{row['read_cpu_us_per_token']:.0f} µs")
    yield line("checks with an eighth read, beside writing", percent(row["share_of_writing"]))
    yield line("checks with everything read, beside writing", percent(row["share_of_writing_if_all_is_read"]))
    draws = (row["seeded_draw_us_per_token"], row["plain_draw_us_per_token"])
    yield line("seeded draw, and torch's own, CPU a token", f"{draws[0]:.1f} and {draws[1]:.1f} µs")
    yield line("an answer", f"{row['bytes_per_token']:.1f} bytes a token")


@pytest.mark.parametrize("expected", [*honest(), *attacks(), *cost()])
def test_every_line_of_a_table_is_the_raw_results(expected):
    assert expected in PAGE


def test_no_honest_token_accuses_its_worker_in_any_class():
    rows = of("honest")

    assert len(rows) >= 2
    assert all(row["tokens"] >= 100_000 and row["accused"] == 0 for row in rows)
    # at least ten times as much is allowed as was ever seen
    assert max(row[key] for row in rows for key in ("worst_margin", "worst_logprob", "worst_sketch")) < 1e-4


def test_a_careless_worker_with_an_old_policy_is_met_however_small_the_step_was():
    rows = [row for row in of("attack") if (row["kind"], row["way"]) == ("stale_policy", "careless")]

    assert min(row["step_lr"] for row in rows) < 2e-7
    assert all(row["answers_found"] == row["texts_found"] == 1.0 for row in rows)


def test_checking_costs_less_than_a_tenth_of_writing():
    (row,) = of("cost")

    assert row["share_of_writing"] < 0.1
