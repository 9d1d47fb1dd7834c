"""What `--dry-run` says of costs is what the raw results say."""

import importlib.util
import json
from pathlib import Path

from phalanx.planner.guard.finding import measured_costs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def script():
    spec = importlib.util.spec_from_file_location("guard_costs", ROOT / "benchmarks" / "guard_costs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_share_is_that_of_the_raw_results_it_names():
    shipped = measured_costs()

    found = script().costs(*(RESULTS / shipped.sources[name] for name in ("fixed", "work", "screen")))

    assert json.loads(json.dumps(found)) == shipped.__dict__
