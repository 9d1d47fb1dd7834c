"""``phalanx bench overhead-law``: each preset's cost at three sizes of step and two models, and the law behind it.

Arms take turns in groups that fit into memory, each beside an unguarded arm of its own. Audits that a coin decides once
in dozens of steps are left out of the presets' arms: one further arm has the owner redo every step, and the expected
number of such audits is priced with what one costs.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, code_version, load_average
from phalanx.lab.bench.measure.process_clock import peak_memory_bytes, physical_memory_bytes
from phalanx.lab.bench.measure.row_file import RowFile, sweep_cells
from phalanx.lab.bench.measure.workloads import PLAIN, prepare_run, scratch_run
from phalanx.lab.bench.overhead.arm import ArmProcess, ArmSpec
from phalanx.lab.bench.overhead.law_fit import GUARD_PARTS, SAME_WORK, LawCell, fit_price_law, part_seconds
from phalanx.lab.bench.overhead.overhead_arms import UNGUARDED
from phalanx.lab.bench.overhead.rows import ArmMeasurement, Row
from phalanx.pipeline import PRESETS, GuardConfig
from phalanx.planner.guard.price_law import PriceLaw, StepSize, extra_bytes_share
from phalanx.train import PipelineRun
from phalanx.train.setup.guard_outlook import watch_of
from phalanx.train.setup.stage_table import step_size

OWNER_ARM = "owner"
LAW_GUARDS: Mapping[str, GuardConfig] = {
    UNGUARDED: GuardConfig(mode="off"),
    **{name: GuardConfig(preset=name, step_audit_rate=0.0, owner_audit_rate=0.0) for name in PRESETS},
    OWNER_ARM: GuardConfig(preset="economy", step_audit_rate=0.0, owner_audit_rate=1.0),
}
_SEQUENCE = 128
_MIN_CELLS = 3
_SINGLES = (("economy",), (OWNER_ARM,), ("light",), ("standard",))
_PAIRS = (("economy", OWNER_ARM), ("light", "standard"))
_ALL = ((PLAIN, "economy", OWNER_ARM), ("light", "standard", "strict"))


@dataclass(frozen=True)
class LawPlan:
    """One model at one size of step.

    Attributes:
        groups: Arms that live at once, each group beside an unguarded arm.
        warm_ups: Steps before the measured ones; undo copies are made at the second.
    """

    model: str
    width: int
    tokens: int
    groups: tuple[tuple[str, ...], ...]
    warm_ups: int
    rounds: int
    steps: int

    @property
    def run(self) -> PipelineRun:
        """The run without a guard: four stages, eight microbatches."""
        run = scratch_run(self.width)
        return run.model_copy(
            update={"train": run.train.model_copy(update={"batch_size": self.tokens // _SEQUENCE, "microbatches": 8})}
        )


def law_plans(quick: bool) -> list[LawPlan]:
    """All cells; quick: the small model and short steps, from which no law comes that others should use."""
    models = {"scratch-3m": 160} if quick else {"scratch-3m": 160, "scratch-10m": 288}
    sizes = (
        ((1024, _ALL, 3, 2, 2), (2048, _ALL, 2, 2, 1), (4096, _PAIRS, 2, 2, 1))
        if quick
        else (
            (2048, _ALL, 3, 4, 2),
            (8192, _ALL, 2, 2, 2),
            (32768, _PAIRS, 2, 2, 1),
        )
    )
    plans = [LawPlan(model, width, *size) for model, width in models.items() for size in sizes]
    # three arms of the larger model at the longest step take more than 22 GiB
    return [replace(plan, groups=_SINGLES) if plan.width * plan.tokens > 2**23 else plan for plan in plans]


def bench_overhead_law(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Measure every cell, one after the other; progress goes to standard error. What is finished is kept.

    Args:
        only_finished: Run nothing; fit the law to the cells that earlier calls with the same code have finished.
    """
    path, code = cache_directory() / "bench" / "overhead-law.jsonl", code_version()
    finished = RowFile[tuple[LawPlan, tuple[str, ...]]](path, lambda cell: [code, asdict(cell[0]), cell[1]])
    return measure_law(law_plans(quick), finished, quick=quick, only_finished=only_finished)


def measure_law(
    plans: Sequence[LawPlan],
    finished: RowFile[tuple[LawPlan, tuple[str, ...]]],
    *,
    quick: bool,
    only_finished: bool = False,
) -> dict[str, Any]:
    """Measure these cells; see `bench_overhead_law`."""
    load, rows, sizes, whole = load_average(), list[Row](), list[StepSize](), list[LawPlan]()
    for plan in plans:
        cells = [(plan, group) for group in plan.groups]
        groups = list(sweep_cells(cells, finished, None if only_finished else _measure_cell, lambda *_: None))
        if len(groups) < len(cells):
            continue
        arms = {arm: row for group in reversed(groups) for arm, row in group["arms"].items()}
        rows += [{"model": plan.model, "tokens": plan.tokens, **row} for row in arms.values()]
        sizes.append(StepSize(**groups[0]["size"]))
        whole.append(plan)
    source = f"overhead-law-cpu-2cores{'-quick' if quick else ''}.json"
    head = {**bench_head("overhead-law", load, quick=quick), "missing": len(plans) - len(whole)}
    fitted = fit_rows(whole, rows, sizes, source) if len(whole) >= _MIN_CELLS else {"law": None}
    return {**head, **fitted, "rows": rows}


def _measure_cell(cell: tuple[LawPlan, tuple[str, ...]]) -> dict[str, Any]:
    with scratch_directory() as directory:
        arms, size = _measure_group(*cell, directory)
    return {"arms": arms, "size": asdict(size)}


def fit_rows(plans: Sequence[LawPlan], rows: Sequence[Row], sizes: Sequence[StepSize], source: str) -> dict[str, Any]:
    """Return `law`, `cells` and `prices` of measured rows."""
    arms = [{str(row["arm"]): row for row in rows if _place_of(row) == (plan.model, plan.tokens)} for plan in plans]
    cells = [_law_cell(cell_arms, size) for cell_arms, size in zip(arms, sizes, strict=True)]
    law = fit_price_law(cells, source)
    prices = [row for plan, cell in zip(plans, cells, strict=True) for row in price_rows(plan, cell, law)]
    return {"law": asdict(law), "cells": [asdict(cell) for cell in cells], "prices": prices}


def _place_of(row: Row) -> tuple[object, object]:
    return row["model"], row["tokens"]


def price_rows(plan: LawPlan, cell: LawCell, law: PriceLaw) -> list[Row]:
    """The cost of each preset at the expected number of its audits: as measured, and by the law.

    Two sizes have no arm for each preset; its measured cost is then None.
    """
    size, rows = cell.size, list[Row]()
    unscreened = law.audit_seconds(cell.microbatch_seconds, screened=False)
    for name in PRESETS:
        run = plan.run.model_copy(update={"guard": GuardConfig(preset=name)})
        rates = watch_of(run)
        if rates is None:
            continue
        load, measured = rates.audit_load, None
        if name in cell.extra_s:
            unit = law.audit_seconds(cell.microbatch_seconds, screened=load.screened)
            measured = cell.extra_s[name] + (load.microbatches * size.watched_stages - cell.audits[name]) * unit
            measured = (measured + load.owner_steps * cell.owner_seconds(unscreened)) / cell.base_s
        predicted = law.extra_share(size, load)
        parts = {f"law_{part}": seconds / cell.base_s for part, seconds in law.extra_parts(size, load).items()}
        rows.append(
            {
                "model": plan.model,
                "tokens": plan.tokens,
                "preset": name,
                "extra_cpu": measured,
                "extra_cpu_by_law": predicted,
                "law_error": None if measured is None else predicted / measured - 1.0,
                "extra_bytes": extra_bytes_share(size, load, run.guard.shadow_upkeep.bytes_sent),
                **parts,
            }
        )
    return rows


def _law_cell(arms: Mapping[str, Row], size: StepSize) -> LawCell:
    def figure(arm: str, name: str) -> float:
        return float(arms[arm][name] or 0.0)

    guarded = [arm for arm in arms if arm not in (PLAIN, UNGUARDED)]
    return LawCell(
        size,
        figure(UNGUARDED, "cpu_s"),
        figure(UNGUARDED, f"{SAME_WORK}_s"),
        {arm: sum(figure(arm, f"more_{part}_s") for part in GUARD_PARTS) for arm in guarded},
        {arm: figure(arm, "audits") for arm in guarded},
        figure("economy", "memory_bytes") - figure(UNGUARDED, "memory_bytes"),
    )


def _measure_group(plan: LawPlan, group: Sequence[str], directory: Path) -> tuple[dict[str, Row], StepSize]:
    with _open_group(plan, group, directory) as (size, crew):
        arms = _take_turns(plan, crew)
        memory = {arm: peak_memory_bytes(process.pids) for arm, process in crew.items()}
        physical = {arm: physical_memory_bytes(process.pids) for arm, process in crew.items()}
    base = _seconds_of(arms[UNGUARDED])
    rows: dict[str, Row] = {}
    for arm, measured in arms.items():
        cpu_s = _cpu_seconds(measured)
        row: Row = {"arm": arm, "steps": measured.step_count, "cpu_s": cpu_s, "memory_bytes": memory[arm]}
        row["physical_memory_bytes"] = physical[arm]
        row["bytes"] = sum(sum(block.report.bytes_by_link.values()) for block in measured.blocks) / measured.step_count
        row["audits"] = sum(block.report.audits for block in measured.blocks) / measured.step_count
        row["loss_last"] = measured.blocks[-1].report.losses[-1]
        if arm != PLAIN:
            parts = _seconds_of(measured)
            extra_s = cpu_s - _cpu_seconds(arms[UNGUARDED])
            more = {part: seconds - base[part] for part, seconds in parts.items()}
            row |= {f"{part}_s": seconds for part, seconds in parts.items()}
            row |= {f"more_{part}_s": seconds for part, seconds in more.items()}
            row |= {"extra_s": extra_s, "not_attributed_s": extra_s - sum(more.values())}
        rows[arm] = row
    return rows, size


def _cpu_seconds(arm: ArmMeasurement) -> float:
    """CPU seconds a step of all the arm's processes, seen from outside."""
    return sum(block.cpu_s for block in arm.blocks) / arm.step_count


def _seconds_of(arm: ArmMeasurement) -> dict[str, float]:
    phases = {phase for seconds in arm.blocks[-1].report.usage.values() for phase in seconds}
    return part_seconds({phase: arm.cpu_of(phase) for phase in phases})


@contextlib.contextmanager
def _open_group(
    plan: LawPlan, group: Sequence[str], directory: Path
) -> Iterator[tuple[StepSize, dict[str, ArmProcess]]]:
    run, cache = plan.run, cache_directory()
    source, _ = prepare_run(run, cache)
    size = step_size(run, source)
    if size is None:
        raise TrainingError("bench: no stage is in other hands")
    with contextlib.ExitStack() as stack:
        crew: dict[str, ArmProcess] = {}
        for arm in (UNGUARDED, *group):
            guard = LAW_GUARDS[UNGUARDED if arm == PLAIN else arm]
            spec = ArmSpec(
                arm=arm,
                plain=arm == PLAIN,
                run=run.model_copy(update={"guard": guard}),
                directory=str(directory / arm),
                cache=str(cache.resolve()),
            )
            crew[arm] = stack.enter_context(ArmProcess(spec, {"OMP_NUM_THREADS": "1"}))
        yield size, crew


def _take_turns(plan: LawPlan, crew: Mapping[str, ArmProcess]) -> dict[str, ArmMeasurement]:
    arms, started = {arm: ArmMeasurement() for arm in crew}, time.monotonic()
    for arm, measured in arms.items():
        measured.before = crew[arm].run_steps(plan.warm_ups).report.usage
    for turn in range(plan.rounds):
        for arm, measured in arms.items():
            measured.blocks.append(crew[arm].run_steps(plan.steps))
        print_progress(
            f"{plan.model}, {plan.tokens} tokens, {', '.join(crew)}: turn {turn + 1} of {plan.rounds}, "
            f"{time.monotonic() - started:.0f} s"
        )
    return arms
