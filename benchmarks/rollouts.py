"""What do examples learn that learn from what the model writes?

``python benchmarks/rollouts.py OUT.json examples/grpo.toml=RUN_DIR [...]`` reads finished runs, each of a run file.

The curve of each: mean reward of the texts of a step, by name, and of the likeliest texts to held-out prompts.
"""

import argparse
import json
import sys
from pathlib import Path

from phalanx.config import digest
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.telemetry import read_metrics
from phalanx.train import load_run


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    arguments = parser.parse_args()
    rows = []
    for given in arguments.runs:
        file, _, run_dir = given.partition("=")
        rows.append(row_of(Path(file), Path(run_dir)))
    result = {
        "name": "rollouts",
        "command": "python benchmarks/rollouts.py OUT.json "
        + " ".join(one.partition("=")[0] for one in arguments.runs),
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load_average(),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


def row_of(file: Path, run_dir: Path) -> dict[str, object]:
    """The figures and the curve of one run."""
    run, summary = load_run(file), json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    if summary["config_digest"] != digest(run) or summary["status"] != "completed":
        sys.exit(f"{run_dir}: is no finished run of {file}")
    lines = read_metrics(run_dir / "metrics.jsonl")
    held_out = [line for line in lines if "validation_reward_exact" in line]
    return {
        "run": file.name,
        "objective": run.train.objective_kind,
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "audits": summary["audits"],
        "first_sampled": lines[0]["reward_exact"],
        "last_held_out": held_out[-1]["validation_reward_exact"],
        "held_out": [[line["step"] + 1, line["validation_reward_exact"]] for line in held_out],
        "sampled": [[line["step"] + 1, line["reward_exact"]] for line in lines],
    }


if __name__ == "__main__":
    main()
