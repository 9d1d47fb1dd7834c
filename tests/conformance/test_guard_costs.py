"""What `--dry-run` says of costs is what the raw results say."""

import json
from pathlib import Path

from phalanx.lab.bench.alone.guard_costs import costs
from phalanx.planner.guard.finding import measured_costs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_every_share_is_that_of_the_raw_results_it_names():
    shipped = measured_costs()

    found = costs(*(RESULTS / shipped.sources[name] for name in ("fixed", "work", "screen")))

    assert json.loads(json.dumps(found)) == shipped.__dict__
