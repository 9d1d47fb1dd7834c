"""What `--dry-run` says of costs is what the raw results say."""

import json
from pathlib import Path

from phalanx.lab.bench.alone.guard_costs import costs, price_law
from phalanx.planner.guard.finding import measured_costs
from phalanx.planner.guard.price_law import measured_law

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_share_is_that_of_the_raw_results_it_names():
    shipped = measured_costs()

    found = costs(RESULTS / shipped.sources["screen"])

    assert json.loads(json.dumps(found)) == shipped.__dict__


def test_the_price_law_is_that_of_the_raw_result_it_names():
    shipped = measured_law()

    assert price_law(RESULTS / shipped.source) == shipped.__dict__
