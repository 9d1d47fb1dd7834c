"""What does preference tuning on people's judgements of harmlessness learn?

``python benchmarks/dpo_harmless.py RUN_DIR OUT.json`` reads a finished run of ``examples/dpo_harmless.toml``.
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

FILE = Path("examples/dpo_harmless.toml")


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    run = load_run(FILE)
    summary = json.loads((arguments.run_dir / "summary.json").read_text(encoding="utf-8"))
    if summary["config_digest"] != digest(run) or summary["status"] != "completed":
        sys.exit(f"{arguments.run_dir}: is no finished run of {FILE}")
    lines = read_metrics(arguments.run_dir / "metrics.jsonl")
    measured = [line for line in lines if "validation_accuracy" in line]
    result = {
        "name": "dpo-harmless",
        "command": f"phalanx train {FILE}; python benchmarks/dpo_harmless.py runs/dpo_harmless OUT.json",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load_average(),
        "run": FILE.name,
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "pairs_held_out": run.data.max_validation_sequences,
        "held_out": [
            {name: line[f"validation_{name}"] for name in ("accuracy", "margin", "kl", "loss")}
            | {"step": line["step"] + 1}
            for line in measured
        ],
        "loss": [line["loss"] for line in lines if math.isfinite(line["loss"])],
    }
    accuracy = result["held_out"][-1]["accuracy"]
    result["interval"] = rate(round(accuracy * run.data.max_validation_sequences), run.data.max_validation_sequences)
    arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
