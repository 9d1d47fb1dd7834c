"""``phalanx bench parallel``: layouts of a few ranks on one model, beside one process and plain torch, in one run."""

import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.bench.machine import current_commit, describe_machine, load_average
from phalanx.bench.plain import PlainTrainer
from phalanx.bench.workloads import scratch_run
from phalanx.data import BatchLoader, prepare
from phalanx.models import open_model
from phalanx.parallel import ParallelConfig
from phalanx.pipeline import PipelineConfig
from phalanx.telemetry import read_metrics
from phalanx.train import RunConfig, step_inputs, train
from phalanx.train.process import deterministic

_ALONE = ParallelConfig()
_PLAIN = "plain torch, one process"
_QUICK = (
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "schedule": "interleaved"},
    {"cp": 2},
)
_MORE = (
    {"dp": 2, "gradient_compression": "bf16"},
    {"dp": 2, "gradient_compression": "powersgd"},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "schedule": "zero-bubble"},
    {"dp": 2, "tp": 2},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "zero": 3},
    {"tp": 2, "pp": 2},
)
_WARM_UP = 2
"""First steps of a run, which are not timed."""

Row = dict[str, Any]


def bench_parallel(quick: bool) -> dict[str, Any]:
    """Measure each layout for some steps; progress goes to standard error.

    Args:
        quick: End within 10 minutes on 2 cores.

    Returns:
        name, machine, commit, load and rows; what was not measured is None.

    Raises:
        PhalanxError: A run failed.
    """
    given = _QUICK if quick else (*_QUICK, *_MORE)
    return measure([ParallelConfig.model_validate(keys) for keys in given], steps=8 if quick else 20, quick=quick)


def measure(layouts: Sequence[ParallelConfig], *, steps: int, quick: bool) -> dict[str, Any]:
    """Measure these layouts beside one process; see `bench_parallel`."""
    load = load_average()
    cache = Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        plain_losses, plain_rate = _plain(_run(_ALONE, steps), cache)
        rows: list[Row] = []
        alone: list[float] = []
        for number, config in enumerate((_ALONE, *layouts)):
            losses, rate = _train(_run(config, steps), Path(directory) / str(number), cache)
            alone = alone or losses
            is_alone = config == _ALONE
            row: Row = {
                "layout": _name(config),
                "ranks": config.world,
                "max_rel_loss_diff": _difference(losses, plain_losses if is_alone else alone),
                "tokens_per_s": rate,
                "peer": _PLAIN if is_alone else None,
                "peer_tokens_per_s": plain_rate if is_alone else None,
                "peak_memory_bytes": None,
                "planned_memory_bytes": None,
            }
            rows.append(row)
            _say(f"{row['layout']}: {rate:.0f} tokens/s, losses differ by {row['max_rel_loss_diff']:.1e}")
    return {
        "name": "parallel",
        "quick": quick,
        "command": f"phalanx bench parallel --json{' --quick' if quick else ''}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "steps": steps,
        "rows": rows,
    }


def _run(config: ParallelConfig, steps: int) -> RunConfig:
    run = scratch_run()
    # heads that 2 and 4 ranks can share
    model = run.model.model_copy(update={"architecture": {**(run.model.architecture or {}), "n_head": 8}})
    train_config = run.train.model_copy(update={"steps": steps, "batch_size": 16, "microbatches": 4})
    optimizer = run.optimizer.model_copy(update={"warmup_steps": 2})
    checkpoint = run.checkpoint.model_copy(update={"every": 0})
    changes = {
        "model": model,
        "train": train_config,
        "optimizer": optimizer,
        "checkpoint": checkpoint,
        "parallel": config,
        "pipeline": PipelineConfig(),
    }
    return run.model_copy(update=changes)


def _train(run: RunConfig, directory: Path, cache: Path) -> tuple[list[float], float]:
    os.environ.setdefault("PHALANX_CACHE", str(cache.resolve()))
    train(run, directory, console=Console(file=io.StringIO()))
    lines = read_metrics(directory / "metrics.jsonl")
    walls = [line["wall_s"] for line in lines][_WARM_UP:]
    return [line["loss"] for line in lines], lines[0]["tokens"] / statistics.median(walls)


def _plain(run: RunConfig, cache: Path) -> tuple[list[float], float]:
    source = open_model(run.model, cache / "models", run.train.seed)
    corpus = prepare(run.data, cache / "data", run.train.seed, source.tokenizer_path, lambda *_: None)
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    trainer = PlainTrainer(source, run.optimizer, run.train.steps)
    losses, walls = [], []
    with deterministic(run.train.threads):
        for step in range(run.train.steps):
            inputs = step_inputs(loader.next(), run.train.microbatches)
            started = time.perf_counter()
            losses.append(trainer.step(step, inputs))
            walls.append(time.perf_counter() - started)
    tokens = run.train.batch_size * run.data.sequence_length
    return losses, tokens / statistics.median(walls[_WARM_UP:])


def _difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def _name(config: ParallelConfig) -> str:
    words = [str(config.layout)]
    words += ["sequence_parallel"] if config.sequence_parallel else []
    words += [config.gradient_compression] if config.gradient_compression != "none" else []
    return " ".join(words)


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
