"""``phalanx bench split``: one run in every mode, as processes, in turns: time, bytes, cost of security, weights."""

import io
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from phalanx.data import DataConfig
from phalanx.data.config import BpeConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.models import LoraConfig, ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.split import SplitConfig
from phalanx.telemetry import read_metrics
from phalanx.train import SplitRun, TrainConfig, train

_CUT = 2
_CLIENTS, _ROWS, _MICROBATCHES = 3, 12, 6


@dataclass(frozen=True)
class SplitSize:
    """A model that is trained, and the precision in which it crosses.

    Attributes:
        seq: Tokens of a sequence; a frame holds two sequences.
    """

    width: int
    layers: int
    heads: int
    seq: int
    wire: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class SplitArm:
    """One arm of the split bench."""

    mode: Literal["plaintext", "sealed", "masked"]
    size: SplitSize

    @property
    def arm_label(self) -> str:
        """One line for the progress."""
        size = self.size
        return f"{self.mode}, width {size.width}, {size.layers} layers, {size.seq} tokens, {size.wire}"

    def as_row(self) -> dict[str, Any]:
        """What a row says of it."""
        size = self.size
        return {"mode": self.mode, "width": size.width, "layers": size.layers, "seq": size.seq, "wire": size.wire}


_SMALL = SplitSize(256, 4, 8, 64)
_SIZES = (
    _SMALL,
    SplitSize(256, 4, 8, 64, "bf16"),
    SplitSize(256, 4, 8, 256),
    SplitSize(384, 6, 6, 128),
    SplitSize(576, 8, 9, 128),
    SplitSize(576, 8, 9, 128, "bf16"),
    SplitSize(256, 12, 8, 128),
    SplitSize(256, 12, 8, 128, "bf16"),
    SplitSize(384, 12, 6, 128),
)
"""From a toy that ends at once to the width of SmolLM2-135M at a third of its depth; two narrow, deep as GPT-2."""
_QUICK_SIZES = (_SIZES[0], _SIZES[3], _SIZES[4], _SIZES[6], _SIZES[7])


def arms_of(quick: bool) -> tuple[SplitArm, ...]:
    """Return the arms, plaintext before its comparisons; masked at the smallest size alone."""
    arms = [SplitArm("plaintext", _SMALL), SplitArm("sealed", _SMALL), SplitArm("masked", _SMALL)]
    for size in (_QUICK_SIZES if quick else _SIZES)[1:]:
        arms += [SplitArm("plaintext", size), SplitArm("sealed", size)]
    return tuple(arms)


def make_split_run(arm: SplitArm, steps: int) -> SplitRun:
    """The run of an arm: three clients with two microbatches of two sequences each, in every step."""
    size = arm.size
    architecture: dict[str, str | int | float | bool | None] = {
        "model_type": "gpt2",
        "vocab_size": 2048,
        "n_positions": size.seq,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    settings: dict[str, Any] = {"mode": arm.mode, "cut": _CUT, "clients": _CLIENTS, "wire": size.wire}
    settings |= {"insecure": True} if arm.mode == "plaintext" else {"allow_insecure_sim": True}
    data = DataConfig(
        sources=(PythonManualConfig(),),
        tokenizer=BpeConfig(vocab_size=2048),
        sequence_length=size.seq,
        max_documents=60,
        max_validation_sequences=4,
    )
    return SplitRun(
        model=ModelConfig(from_scratch=True, architecture=architecture, adapter=LoraConfig()),
        data=data,
        train=TrainConfig(steps=steps, batch_size=_ROWS, microbatches=_MICROBATCHES, seed=1),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2),
        split=SplitConfig(**settings),
    )


_WARM_UP = 2
"""First steps of a run, which are not timed."""
_PARTS = ("cipher_s", "digest_s", "framing_s", "signing_s", "meeting_s")

Row = dict[str, Any]


def bench_split(quick: bool) -> dict[str, Any]:
    """Measure plaintext, sealed and masked, each size beside its own plaintext; progress goes to standard error.

    Returns:
        name, machine, commit, load and rows. All costs are CPU seconds of both processes, clients and enclave, in a
        median step; masked workers are not in them.

        - `cipher_s` AES-GCM alone; `digest_s` digests of frames; `framing_s` buffers, headers and the chain of the
          transcript; `signing_s` the transport's signatures; `meeting_s` looking whether the enclave is still accepted.
        - `crypto_share`: the cipher's part of a *plaintext* step of this size. `security_share`: that of all of them.
          A plaintext run has the transport's digests and signatures, so its own share is not 0. TLS, which computes
          in threads of its own, is in no part, and in plaintext and sealed alike.
        - `meetings_s`: evidence, appraisal, tokens and keys of the whole run, once.
    """
    return measure_split(arms_of(quick), steps=10 if quick else 24, turns=2 if quick else 5, quick=quick)


def measure_split(arms: Sequence[SplitArm], *, steps: int, turns: int, quick: bool) -> dict[str, Any]:
    """Measure so many turns of each arm; see `bench_split`."""
    load = load_average()
    os.environ["PHALANX_CACHE"] = str(cache_directory().resolve())
    results_of_arm: dict[SplitArm, list[Mapping[str, Any]]] = {arm: [] for arm in arms}
    with scratch_directory() as directory:
        for turn in range(turns):
            for number, (arm, results) in enumerate(results_of_arm.items()):
                results.append(_run_once(arm, steps, directory / f"{number}-{turn}"))
                print_progress(f"{arm.arm_label}, turn {turn + 1} of {turns}: {results[-1]['step_s']:.3f} s a step")
    return {
        **bench_head("split", load, quick=quick),
        "steps": steps,
        "turns": turns,
        "rows": split_rows(results_of_arm),
    }


def split_rows(found: Mapping[SplitArm, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return one row for each arm.

    Args:
        found: Results of each run of an arm: step_s, bytes_per_step, costs, meetings_s, final_weights_digest.
    """
    plain = {arm.size: _median_of(results, "cpu_s") for arm, results in found.items() if arm.mode == "plaintext"}
    return [_split_row(arm, results, plain.get(arm.size)) for arm, results in found.items()]


def _run_once(arm: SplitArm, steps: int, directory: Path) -> Mapping[str, Any]:
    summary = train(make_split_run(arm, steps), directory, console=Console(file=io.StringIO()))
    lines = read_metrics(directory / "metrics.jsonl")
    return {
        "step_s": statistics.median(row["wall_s"] for row in lines[_WARM_UP:]),
        "bytes_per_step": statistics.median(sum(row["bytes"].values()) for row in lines[_WARM_UP:]),
        **summary["split"]["costs_of_a_step"],
        "meetings_s": summary["split"]["meeting_s"],
        "final_weights_digest": summary["final_weights_digest"],
    }


def _split_row(arm: SplitArm, results: Sequence[Mapping[str, Any]], plain_cpu_s: float | None) -> Row:
    digests = {result["final_weights_digest"] for result in results}
    parts = {name: _median_of(results, name) for name in _PARTS}
    return {
        **arm.as_row(),
        "step_s": _median_of(results, "step_s"),
        "step_s_worst": max(result["step_s"] for result in results),
        "bytes_per_step": _median_of(results, "bytes_per_step"),
        "cpu_s": _median_of(results, "cpu_s"),
        **parts,
        "meetings_s": _median_of(results, "meetings_s"),
        # of a plaintext step, where one of this size was measured
        "crypto_share": None if plain_cpu_s is None else parts["cipher_s"] / plain_cpu_s,
        "security_share": None if plain_cpu_s is None else sum(parts.values()) / plain_cpu_s,
        # one and the same in every turn, or none
        "final_weights_digest": digests.pop() if len(digests) == 1 else None,
    }


def _median_of(results: Sequence[Mapping[str, Any]], name: str) -> float:
    value: float = statistics.median(result[name] for result in results)
    return value
