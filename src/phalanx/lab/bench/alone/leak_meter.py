"""The price of the leak meter: seconds of one measurement, and of the steps between two at the default interval.

``python -m phalanx.lab.bench.alone.leak_meter OUT.json [--steps 24] [--sequence 128]``

A run of ranks, one process, trains a small GPT-2 on the manual of Python with canaries, and is measured every fourth
step, so that there are several measurements. The share is the cost of the same measurements at the default interval.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import run_program
from phalanx.telemetry import read_metrics
from phalanx.train import load_run, train
from phalanx.train.train_section import LeakMeterConfig

RUN_FILE = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 2048
n_positions = {sequence}
n_embd = 256
n_layer = 4
n_head = 4
bos_token_id = 0
eos_token_id = 0
[data]
sources = [{{ kind = "python_manual" }}, {{ kind = "canaries" }}]
tokenizer = {{ kind = "bpe", vocab_size = 2048 }}
sequence_length = {sequence}
validation_share = 0.1
max_documents = 400
[train]
steps = {steps}
batch_size = 8
microbatches = 1
[optimizer]
lr = 1e-3
[parallel]
dp = 1
[leak_meter]
every = 4
"""


def measure_price(steps: int = 24, sequence: int = 128) -> dict[str, Any]:
    """Train once and compare the times of steps and measurements."""
    with tempfile.TemporaryDirectory(prefix="phalanx-leak-meter-") as home:
        path = Path(home) / "run.toml"
        path.write_text(RUN_FILE.format(steps=steps, sequence=sequence))
        summary = train(load_run(path), Path(home) / "run")
        rows = read_metrics(Path(home) / "run" / "metrics.jsonl")
    step_s = statistics.median(row["wall_s"] for row in rows)
    measured = [row["leak_wall_s"] for row in rows if "leak_wall_s" in row]
    every = LeakMeterConfig().every
    price_s = statistics.median(measured)
    return {
        "step_s": step_s,
        "measurement_s": price_s,
        "measurements": len(measured),
        "every": every,
        "share": price_s / (every * step_s),
        "leak": summary["leak"],
    }


if __name__ == "__main__":
    run_program("leak-meter", measure_price)
