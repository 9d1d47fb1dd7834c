"""What `--dry-run` says of costs is what the raw results say."""

import json
from pathlib import Path

import pytest

from phalanx.lab.bench.alone.guard_costs import costs, price_law
from phalanx.lab.bench.overhead.overhead_law import fit_rows, law_plans
from phalanx.planner.guard.finding import measured_costs
from phalanx.planner.guard.price_law import StepSize, measured_law

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_share_is_that_of_the_raw_results_it_names():
    shipped = measured_costs()

    found = costs(RESULTS / shipped.sources["screen"])

    assert json.loads(json.dumps(found)) == shipped.__dict__


def test_the_price_law_is_that_of_the_raw_result_it_names():
    shipped = measured_law()

    assert price_law(RESULTS / shipped.source) == shipped.__dict__


def test_the_law_and_the_prices_are_those_of_the_measured_rows():
    source = measured_law().source
    result = json.loads((RESULTS / source).read_text(encoding="utf-8"))
    cells = {(row["model"], row["tokens"]) for row in result["rows"]}
    plans = [plan for plan in law_plans(quick=False) if (plan.model, plan.tokens) in cells]

    again = fit_rows(plans, result["rows"], [StepSize(**cell["size"]) for cell in result["cells"]], source)

    # another build of the linear algebra rounds otherwise
    assert again["law"] == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for name, value in result["law"].items()
    }
    assert [row["extra_cpu"] for row in again["prices"]] == [
        value if value is None else pytest.approx(value, rel=1e-6)
        for value in (row["extra_cpu"] for row in result["prices"])
    ]
