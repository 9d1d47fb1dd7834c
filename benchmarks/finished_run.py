"""A finished run of an example, as the benchmarks of examples read it."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from phalanx.config import digest
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.telemetry import read_metrics
from phalanx.train import load_run


class FinishedRun:
    """The run file, summary and metrics of a run; exits where the directory holds no finished run of that file."""

    def __init__(self, file: Path, run_dir: Path) -> None:
        self.file, self.config = file, load_run(file)
        self.summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        if self.summary["config_digest"] != digest(self.config) or self.summary["status"] != "completed":
            sys.exit(f"{run_dir}: is no finished run of {file}")
        self.lines = read_metrics(run_dir / "metrics.jsonl")

    def facts(self, name: str, script: str) -> dict[str, Any]:
        """What every result says first; `script` is the call that makes it."""
        return {
            "name": name,
            "command": f"phalanx train {self.file}; {script}",
            "machine": describe_machine(),
            "commit": current_commit(),
            "load": load_average(),
            "run": self.file.name,
            "steps": self.summary["steps"],
            "wall_s": self.summary["wall_s"],
        }

    def perplexities(self) -> list[list[float]]:
        """Held-out perplexities with the steps they were measured after; at 0, that of the untouched model."""
        # the first line has what the untouched model was measured at
        found = [(line["step"] + 1, line.get("validation_perplexity")) for line in self.lines[1:]]
        first = [0, self.summary["validation_perplexity_first"]]
        return [first, *([step, value] for step, value in found if value is not None)]

    def losses(self) -> list[float]:
        """The loss of every step that has one."""
        return [line["loss"] for line in self.lines if math.isfinite(line["loss"])]


def arguments_of(text: str | None) -> argparse.ArgumentParser:
    """The two arguments of these benchmarks; `text` is the benchmark's own docstring."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    return parser


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write one JSON object."""
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")
