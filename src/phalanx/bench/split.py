"""``phalanx bench split``: one run in every mode, as processes, in turns: time, bytes, cryptography, weights."""

import io
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.bench.machine import current_commit, describe_machine, load_average
from phalanx.data import DataConfig
from phalanx.data.config import BpeConfig, PythonManualConfig
from phalanx.models import LoraConfig, ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.split import SplitConfig
from phalanx.telemetry import read_metrics
from phalanx.train import RunConfig, TrainConfig, train

_WARM_UP = 2
"""First steps of a run, which are not timed."""
_CUT = 2
_MODES = ("plaintext", "sealed", "masked")

Row = dict[str, Any]


def bench_split(quick: bool) -> dict[str, Any]:
    """Measure plaintext, sealed and masked; progress goes to standard error.

    Args:
        quick: End within 10 minutes on 2 cores.

    Returns:
        name, machine, commit, load and rows. `crypto_share` is CPU time of sealing and opening tensors, digests for the
        transcript included, as a share of both processes' CPU time in the steps; TLS and masking are not in it.

    Raises:
        PhalanxError: A run failed.
    """
    return measure(steps=8 if quick else 24, turns=2 if quick else 5, width=256, quick=quick)


def measure(*, steps: int, turns: int, width: int, quick: bool) -> dict[str, Any]:
    """Measure so many turns of each mode on a model of this width; see `bench_split`."""
    load = load_average()
    os.environ.setdefault("PHALANX_CACHE", str((Path("runs") / ".cache").resolve()))
    found: dict[str, list[Mapping[str, Any]]] = {mode: [] for mode in _MODES}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        for turn in range(turns):
            for mode, results in found.items():
                results.append(_run_once(run_of(mode, steps, width), Path(directory) / f"{mode}-{turn}"))
                _say(f"{mode}, turn {turn + 1} of {turns}: {results[-1]['step_s']:.3f} s a step")
    return {
        "name": "split",
        "quick": quick,
        "command": f"phalanx bench split --json{' --quick' if quick else ''}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "steps": steps,
        "turns": turns,
        "width": width,
        "rows": [_row(mode, found[mode]) for mode in _MODES],
    }


def run_of(mode: str, steps: int, width: int) -> RunConfig:
    """The run that is measured: three clients, four layers of which two are theirs."""
    architecture: dict[str, str | int | float | bool | None] = {
        "model_type": "gpt2",
        "vocab_size": 2048,
        "n_positions": 64,
        "n_embd": width,
        "n_layer": 4,
        "n_head": 8,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    given: dict[str, Any] = {"mode": mode, "cut": _CUT, "clients": 3}
    given |= {"insecure": True} if mode == "plaintext" else {"allow_insecure_sim": True}
    data = DataConfig(
        sources=(PythonManualConfig(),),
        tokenizer=BpeConfig(vocab_size=2048),
        sequence_length=64,
        max_documents=60,
        max_validation_sequences=4,
    )
    return RunConfig(
        model=ModelConfig(from_scratch=True, architecture=architecture, adapter=LoraConfig()),
        data=data,
        train=TrainConfig(steps=steps, batch_size=12, microbatches=6, seed=1),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2),
        split=SplitConfig(**given),
    )


def _run_once(run: RunConfig, directory: Path) -> Mapping[str, Any]:
    summary = train(run, directory, console=Console(file=io.StringIO()))
    lines = read_metrics(directory / "metrics.jsonl")
    return {
        "step_s": statistics.median(line["wall_s"] for line in lines[_WARM_UP:]),
        "bytes_per_step": statistics.median(sum(line["bytes"].values()) for line in lines[_WARM_UP:]),
        "crypto_share": summary["split"]["crypto_s"] / summary["split"]["cpu_s"],
        "final_weights_digest": summary["final_weights_digest"],
    }


def _row(mode: str, results: list[Mapping[str, Any]]) -> Row:
    digests = {result["final_weights_digest"] for result in results}
    return {
        "mode": mode,
        "step_s": statistics.median(result["step_s"] for result in results),
        "step_s_worst": max(result["step_s"] for result in results),
        "bytes_per_step": statistics.median(result["bytes_per_step"] for result in results),
        "crypto_share": statistics.median(result["crypto_share"] for result in results),
        # one and the same in every turn, or none
        "final_weights_digest": digests.pop() if len(digests) == 1 else None,
    }


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
