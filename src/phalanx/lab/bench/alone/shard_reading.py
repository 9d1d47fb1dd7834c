"""A bench of the reading of token shards, beside a plain memory map and what a training step takes.

``python -m phalanx.lab.bench.alone.shard_reading OUT.json [--tokens 67108864] [--steps 4] [--note TEXT]``

Windows of 1,024 tokens are read in a random order, each once an epoch, on one core; verified reading hashes in its
first epoch, encrypted reading decrypts whenever a leaf is not kept any more. The training step is that of the plain
model of ``bench pipeline``, "scratch-10m". All by processor time, as other work on the machine stretches wall time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.data import Batch
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.lab.bench.measure.plain import PlainTrainer
from phalanx.lab.bench.measure.shard_reading import ReadingPlan, measure_reading
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import open_model
from phalanx.train.loop import step_inputs


def measure(plan: ReadingPlan, steps: int, note: str) -> dict[str, Any]:
    """Measure the reading, then the step."""
    load, rows = load_average(), measure_reading(plan)
    return {
        "name": "shard-reading",
        "command": f"python -m phalanx.lab.bench.alone.shard_reading OUT --tokens {plan.tokens} --steps {steps}",
        "note": note,
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": [load, load_average()],
        "training_tokens_per_cpu_s": training_rate(steps),
        "rows": rows,
    }


def training_rate(steps: int) -> float:
    """Return the tokens that a step of the plain model takes in a second of one core, the median over some steps."""
    run, times = scratch_run(), []
    with tempfile.TemporaryDirectory() as cache:
        source = open_model(run.model, Path(cache), run.train.seed)
        trainer = PlainTrainer(source, run.optimizer, run.train.steps)
        ids = torch.randint(0, source.vocab_size, (run.train.batch_size, run.data.sequence_length))
        inputs = step_inputs(Batch(ids, ids, tuple(range(len(ids)))), run.train.microbatches)
        for step in range(steps + 1):
            began = time.process_time()
            trainer.step(step, inputs)
            times.append(time.process_time() - began)
    # the first step also allocates
    return ids.numel() / statistics.median(times[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=ReadingPlan.tokens)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--note", default="")
    given = parser.parse_args()
    result = measure(ReadingPlan(tokens=given.tokens), given.steps, given.note)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in result["rows"]:
        sys.stderr.write(f"{json.dumps(line)}\n")
