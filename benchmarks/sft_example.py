"""What does the example of supervised fine-tuning learn?

``python benchmarks/sft_example.py RUN_DIR OUT.json`` reads a finished run of ``examples/sft.toml``.
"""

import argparse
import json
import sys
from pathlib import Path

from phalanx.config import digest
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.telemetry import read_metrics
from phalanx.train import load_run

FILE = Path("examples/sft.toml")


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
    # the first line has what the untouched model was measured at
    found = [(line["step"] + 1, line.get("validation_perplexity")) for line in lines[1:]]
    measured = [[step, value] for step, value in found if value is not None]
    result = {
        "name": "sft-example",
        "command": f"phalanx train {FILE}; python benchmarks/sft_example.py runs/sft OUT.json",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load_average(),
        "run": FILE.name,
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "audits": summary["audits"],
        "held_out_perplexity": [[0, summary["validation_perplexity_first"]], *measured],
        "loss": [line["loss"] for line in lines],
    }
    arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
