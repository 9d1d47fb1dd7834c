"""Compute what dp-accounting's PLD accountant says of some runs, for tests that compare ours with it.

    python -m venv /tmp/pld && /tmp/pld/bin/pip install dp-accounting==0.6.0
    /tmp/pld/bin/python scripts/pld_vectors.py > tests/vectors/privacy/pld.json

dp-accounting asks for attrs < 24, which other packages of the tests do not; hence an environment of its own.
"""

import json
import sys
from importlib import metadata

import dp_accounting
from dp_accounting.pld import PLDAccountant

CASES = [
    (1.0, 0.01, 1000, 1e-5),
    (0.6, 0.05, 500, 1e-5),
    (1.1, 0.02, 3000, 1e-6),
    (2.0, 0.1, 200, 1e-5),
    (0.8, 0.004, 2000, 1e-6),
    (4.0, 1.0, 50, 1e-5),
    (1.0, 0.25, 30, 1e-4),
]


def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return the epsilon of a run."""
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def main() -> None:
    """Print them."""
    names = ("noise_multiplier", "rate", "steps", "delta")
    cases = [{**dict(zip(names, case, strict=True)), "epsilon": epsilon(*case)} for case in CASES]
    found = {"made_by": f"dp-accounting {metadata.version('dp-accounting')}, scripts/pld_vectors.py", "cases": cases}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
