"""How often is a reward model right that has learned people's judgements of harmlessness?

``python benchmarks/reward_harmless.py RUN_DIR OUT.json`` reads a finished run of ``examples/reward_harmless.toml``.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from phalanx.align.safety import rate
from phalanx.config import digest
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.telemetry import read_metrics
from phalanx.train import load_run

FILE = Path("examples/reward_harmless.toml")


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", type=int, required=True, help="pairs held out, as the run says when it begins")
    arguments = parser.parse_args()
    run = load_run(FILE)
    summary = json.loads((arguments.run_dir / "summary.json").read_text(encoding="utf-8"))
    if summary["config_digest"] != digest(run) or summary["status"] != "completed":
        sys.exit(f"{arguments.run_dir}: is no finished run of {FILE}")
    lines = read_metrics(arguments.run_dir / "metrics.jsonl")
    found, pairs = summary["preferences"], arguments.held_out
    right = found["accuracy"] * pairs
    if abs(2 * right - round(2 * right)) > 1e-6:
        sys.exit(f"--held-out: {pairs} pairs do not give an accuracy of {found['accuracy']}")
    result = {
        "name": "reward-harmless",
        "command": f"phalanx train {FILE}; python benchmarks/reward_harmless.py RUN_DIR OUT.json --held-out {pairs}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load_average(),
        "run": FILE.name,
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "preferences": found,
        "interval": rate(math.floor(right), pairs),
        "loss": [line["loss"] for line in lines if math.isfinite(line["loss"])],
    }
    arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
