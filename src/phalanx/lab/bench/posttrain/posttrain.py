"""``phalanx bench posttrain``: fine-tuning and preferences beside TRL on the same rows, and under the guard."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.data import DataConfig
from phalanx.data.chat.settings import PreferencesConfig, PreferenceSource
from phalanx.data.config import BpeConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import LineProcess, print_progress, scratch_directory, start_peer
from phalanx.lab.bench.measure.machine import load_average, result_context
from phalanx.lab.bench.measure.process_clock import cpu_seconds, process_tree, wait_until_quiet
from phalanx.lab.bench.measure.resident import Resident, added_at_peak, read_resident, reset_peak
from phalanx.lab.bench.measure.workloads import GUARDS
from phalanx.lab.bench.posttrain.arm import PosttrainSpec, TurnReport, TurnRequest
from phalanx.lab.bench.posttrain.rows import PosttrainPlan, write_rows
from phalanx.models import ModelConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import PipelineRun, TrainConfig

PEER_VARIABLE = "PHALANX_TRL_PYTHON"
"""Names the Python of an environment with TRL; unset, the peer's figures are null."""

OURS, UNGUARDED, GUARDED = "ours", "ours_unguarded", "ours_guarded"
PIPELINES = {UNGUARDED: GUARDS["unguarded"], GUARDED: GUARDS["guarded_light"]}
TRL, ASKED = "trl", "trl_reference_asked"
PEERS: dict[str, tuple[str, ...]] = {"sft": (TRL,), "dpo": (TRL, ASKED)}
"""TRL's arms by objective. Of DPO the first one has the reference stored, as this package has it, and the second one
asks it in every step, which is TRL's default."""
_SAME_LOSS = 1e-3
_QUIET_TIMEOUT_S = 120.0


def bench_posttrain(quick: bool) -> dict[str, Any]:
    """Measure both objectives; progress goes to standard error."""
    plan = PosttrainPlan(turns=2) if quick else PosttrainPlan()
    return measure_posttrain(plan, os.environ.get(PEER_VARIABLE) or None) | {"quick": quick}


def measure_posttrain(plan: PosttrainPlan, python: str | None) -> dict[str, Any]:
    """Let the arms of each objective take turns."""
    load = load_average()
    rows: list[dict[str, Any]] = []
    for objective in PEERS:
        with scratch_directory() as directory:
            rows += _measure_objective(plan, objective, python, directory)
    return {
        "name": "posttrain",
        "command": f"{PEER_VARIABLE}=PYTHON phalanx bench posttrain --json",
        **result_context([load, load_average()]),
        "plan": plan.model_dump(),
        "rows": rows,
    }


@dataclass
class _Arm:
    """A process that trains on request, and its measurements."""

    name: str
    process: LineProcess
    version: str
    counts_memory: bool
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    before: Resident | None = None

    def take_turn(self, steps: int, *, is_measured: bool) -> None:
        used = cpu_seconds(process_tree(self.process.process_id)) if is_measured else 0.0
        began = time.perf_counter()
        self.losses += self.process.ask(TurnRequest(steps=steps), TurnReport).losses
        took = time.perf_counter() - began
        pids = process_tree(self.process.process_id)
        wait_until_quiet(pids, _QUIET_TIMEOUT_S)
        if is_measured:
            self.cpu_s.append(cpu_seconds(pids) - used)
            self.wall_s.append(took)

    def peak_bytes(self) -> int | None:
        """How far its memory rose above what libraries alone take."""
        return None if self.before is None else added_at_peak(self.before, self.process.process_id)


def _measure_objective(
    plan: PosttrainPlan, objective: str, python: str | None, directory: Path
) -> list[dict[str, Any]]:
    source, smallest = (
        plan.open_plan_model(directory / "model"),
        plan.open_plan_model(directory / "rehearsal", smallest=True),
    )
    tokens = write_rows(plan, objective, source, directory / "rows.safetensors")
    shared = PosttrainSpec(
        objective=objective,
        model=str(source.directory),
        rehearsal=str(smallest.directory),
        rows=str(directory / "rows.safetensors"),
        batch_size=plan.batch_size,
        length=plan.length,
        directory=str(directory),
    )
    names = [OURS, *(PEERS[objective] if python else ()), UNGUARDED, GUARDED]
    with contextlib.ExitStack() as stack:
        arms = []
        for name in names:
            arms.append(_start_arm(name, shared, plan, python, stack))
            print_progress(f"{objective}: {name} is ready")
        for turn in range(plan.turns + 1):
            # each side is first in some turn
            for arm in arms if turn % 2 else reversed(arms):
                arm.take_turn(plan.steps, is_measured=turn > 0)
            print_progress(f"{objective}: turn {turn + 1} of {plan.turns + 1}")
        peaks = {arm.name: arm.peak_bytes() for arm in arms}
    return posttrain_rows(objective, {arm.name: arm for arm in arms}, peaks, tokens[plan.steps :])


def _start_arm(
    name: str, shared: PosttrainSpec, plan: PosttrainPlan, python: str | None, stack: contextlib.ExitStack
) -> _Arm:
    directory = Path(shared.directory) / name.replace(" ", "_")
    directory.mkdir()
    changes: dict[str, Any] = {"directory": str(directory), "stored_reference": name != ASKED}
    if name in PIPELINES:
        changes["run"] = _pipeline_run(shared, plan, name)
    path = directory / "spec.json"
    path.write_text(shared.model_copy(update=changes).model_dump_json(), encoding="utf-8")
    environment = {"OMP_NUM_THREADS": "1"}
    if name in PEERS[shared.objective]:
        program = str(Path(__file__).with_name("peer.py"))
        process = start_peer(name, python or "", (program, str(path)), environment, directory / "log")
    else:
        process = LineProcess(name, ("phalanx.lab.bench.posttrain.arm", str(path)), environment, directory / "log")
    arm = _Arm(name, stack.enter_context(process), "", name not in PIPELINES)
    arm.version = TurnReport.model_validate_json(process.read_text()).version or ""
    if arm.counts_memory:
        reset_peak(process.process_id)
        arm.before = read_resident(process.process_id)
    return arm


def _pipeline_run(shared: PosttrainSpec, plan: PosttrainPlan, arm: str) -> PipelineRun:
    """The run of a pipeline. What it says of data is what such a run must say: the bench has rows of its own."""
    tokenizer = BpeConfig(vocab_size=min(plan.vocab_size, 4096))
    if shared.objective == "dpo":
        pairs = PreferencesConfig(sources=(PreferenceSource(path=Path("pairs.jsonl")),))
        data = DataConfig(preferences=pairs, tokenizer=tokenizer, sequence_length=plan.length)
    else:
        data = DataConfig(sources=(PythonManualConfig(),), tokenizer=tokenizer, sequence_length=plan.length)
    return PipelineRun(
        model=ModelConfig(path=shared.model),
        data=data,
        train=TrainConfig(
            steps=plan.total_steps, batch_size=plan.batch_size, microbatches=4, seed=1, objective=shared.run_objective
        ),
        optimizer=shared.optimizer_config,
        pipeline=PipelineConfig(stages=min(4, plan.layers)),
        guard=PIPELINES[arm],
    )


def posttrain_rows(
    objective: str, arms: Mapping[str, _Arm], peaks: Mapping[str, int | None], tokens: Sequence[int]
) -> list[dict[str, Any]]:
    """One row an arm; ratios are medians over turns, within which all arms had the machine in its state.

    Args:
        arms: Measurements by arm name; TRL's may be missing.
        tokens: Tokens of each measured step, padding left out.
    """
    ours = arms[OURS]
    rows = []
    for name in (OURS, *PEERS[objective], UNGUARDED, GUARDED):
        arm = arms.get(name)
        row: dict[str, Any] = {"objective": objective, "arm": name, "version": None, "steps": None}
        row |= dict.fromkeys(("tokens_per_s", "tokens_per_cpu_s", "peak_memory_bytes"))
        row |= dict.fromkeys(("loss_last", "max_loss_diff", "max_rel_loss_diff"))
        row |= dict.fromkeys(("speed_of_phalanx", "memory_of_phalanx", "extra_over_unguarded"))
        rows.append(row)
        if arm is None:
            continue
        differences = [abs(a - b) for a, b in zip(arm.losses, ours.losses, strict=True)]
        if max(differences) > _SAME_LOSS:
            raise TrainingError(f"bench posttrain: {name} learns something else: losses differ by {max(differences)}")
        row["version"], row["steps"] = arm.version, len(tokens)
        row["tokens_per_s"], row["tokens_per_cpu_s"] = (
            sum(tokens) / sum(seconds) for seconds in (arm.wall_s, arm.cpu_s)
        )
        row["loss_last"], row["max_loss_diff"] = arm.losses[-1], max(differences)
        row["max_rel_loss_diff"] = max(
            abs(difference / b) for difference, b in zip(differences, ours.losses, strict=True)
        )
        peak, our_peak = peaks.get(name), peaks.get(OURS)
        row["peak_memory_bytes"] = peak
        if name in PEERS[objective]:
            row["speed_of_phalanx"] = median(b / a for a, b in zip(ours.cpu_s, arm.cpu_s, strict=True))
            row["memory_of_phalanx"] = our_peak / peak if our_peak and peak else None
        if name == GUARDED:
            base = arms[UNGUARDED].cpu_s
            row["extra_over_unguarded"] = median(a / b for a, b in zip(arm.cpu_s, base, strict=True)) - 1.0
    return rows
