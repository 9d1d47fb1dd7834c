"""``phalanx bench detection``: which party is convicted, in which step, and whether it was guilty; in one process."""

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.config import digest_config
from phalanx.lab.attacks import ATTACKS
from phalanx.lab.bench.detection.cell import GUARDS, DetectionCell
from phalanx.lab.bench.detection.cells import detection_cells, economy_cells, exact_cells
from phalanx.lab.bench.detection.simulated_run import (
    CleanRun,
    CompanyResult,
    accepted_lies,
    first_detected_step,
    is_found,
    is_undone,
    num_sequences,
    play_company,
    run_clean,
    without_guard_and_attack,
)
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, code_version, load_average
from phalanx.lab.bench.measure.row_file import Row, RowFile, sweep_cells
from phalanx.pipeline import keep_freed_memory
from phalanx.train.setup.process import deterministic_kernels

PROTOCOL = 4
"""To be raised when a figure comes to mean something else; the commit is in every key as well."""


def bench_detection(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Simulate honest companies and every attack of the table; progress goes to standard error.

    Args:
        quick: One rate and one place.
        only_finished: Simulate nothing; show what earlier calls with the same code have finished.

    Returns:
        Rows, how many are missing, and the blocks `false_accusations_per_million` and `evidence`; a figure that was
        not measured is None.
    """
    finished = open_detection_rows(cache_directory() / "bench" / "detection.jsonl", code_version())
    return measure_detection(detection_cells(quick=quick), finished, quick=quick, only_finished=only_finished)


def bench_detection_economy(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Simulate every attack of the table once against the preset `economy`, until the attacker is excluded."""
    return _measure_table("detection-economy", economy_cells(quick=quick), quick, only_finished)


def bench_detection_exact(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Simulate every attack of the table once against `standard` in a run with exact numerics."""
    return _measure_table("detection-exact", exact_cells(quick=quick), quick, only_finished)


def _measure_table(name: str, cells: Sequence[DetectionCell], quick: bool, only_finished: bool) -> dict[str, Any]:
    finished = open_detection_rows(cache_directory() / "bench" / "detection.jsonl", code_version())
    result = measure_detection(cells, finished, quick=quick, only_finished=only_finished)
    head = bench_head(name, result["load"], quick=quick, commit=result["commit"])
    return {**result, **head, "guards": {cells[0].guard: result["guards"][cells[0].guard]}}


def open_detection_rows(path: Path, code: str) -> RowFile[DetectionCell]:
    """Companies that were played by this very code."""
    return RowFile(path, lambda cell: [PROTOCOL, code, cell.run.model_dump(mode="json"), *_besides_run(cell)])


def measure_detection(
    what: Sequence[DetectionCell], finished: RowFile[DetectionCell], *, quick: bool, only_finished: bool = False
) -> dict[str, Any]:
    """Play the unfinished cells; see `bench_detection`."""
    load, code = load_average(), code_version()
    started = time.monotonic()
    with scratch_directory() as directory, deterministic_kernels(threads=1):
        keep_freed_memory()
        field = _DetectionBench([cell for cell in what if finished.find_row(cell) is None], directory)
        rows = list(sweep_cells(what, finished, None if only_finished else field.simulate_cell, _print_cell))
    return {
        **bench_head("detection", load, quick=quick, commit=code),
        "wall_s": time.monotonic() - started,
        "guards": {name: guard.model_dump(mode="json") for name, guard in GUARDS.items()},
        "missing": len(what) - len(rows),
        "false_accusations_per_million": false_accusations_per_million(rows),
        "evidence": explained_evidence(rows),
        "rows": rows,
    }


def false_accusations_per_million(rows: Iterable[Row]) -> dict[str, Any]:
    """Compute how often an honest party was convicted or blamed, by the number of audited messages, for audited guards.

    Returns:
        The share per million and its parts; `at_most` is the bound that holds with 95 % certainty when there was none
        (the rule of three).
    """
    audited = [row for row in rows if row["audited_messages"]]
    messages = sum(row["audited_messages"] for row in audited)
    count = sum(row["false_accusations"] for row in audited)
    honest = [row for row in audited if row["attack"] == "none"]
    by_paths: dict[str, int] = {}
    for row in honest:
        paths = " / ".join(row["paths"]) or "one path"
        by_paths[paths] = by_paths.get(paths, 0) + row["audited_messages"]
    return {
        "value": 1e6 * count / messages if messages else None,
        "false_accusations": count,
        "audited_messages": messages,
        "audited_messages_of_honest_companies": sum(row["audited_messages"] for row in honest),
        "of_them_by_paths": by_paths,
        "of_them_compared_by_distance": sum(row["compared_by_distance"] or 0 for row in honest),
        "false_accusations_in_honest_companies": sum(row["false_accusations"] for row in honest),
        "at_most": 3e6 / messages if messages and not count else None,
    }


def explained_evidence(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Count what an offline reader makes of the evidence of every verdict, by offence and over all of them."""
    counts: dict[str, dict[str, int]] = {"all": dict.fromkeys(CONCLUSIONS, 0)}
    for row in rows:
        for offence, conclusion in row["evidence"]:
            for of in ("all", offence):
                counts.setdefault(of, dict.fromkeys(CONCLUSIONS, 0))[conclusion] += 1
    return counts


CONCLUSIONS = ("proved", "refuted", "not_provable")


class _DetectionBench:
    """A simulator of cells; the undisturbed run is trained once for each layout, as long as any cell needs."""

    def __init__(self, what: Iterable[DetectionCell], directory: Path) -> None:
        self._directory = directory
        self._clean: dict[str, CleanRun] = {}
        self._steps: dict[str, int] = {}
        for cell in what:
            layout = digest_config(without_guard_and_attack(cell.run))
            self._steps[layout] = max(cell.steps, self._steps.get(layout, 0))

    def simulate_cell(self, cell: DetectionCell) -> Row:
        """Simulate a cell and compare it with the undisturbed run of the same seed."""
        clean = self._clean_run(cell)
        started, cpu = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            outcome = play_company(cell, Path(directory), self._model_cache)
        costs = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        return detection_row(cell, outcome, clean) | costs

    def _clean_run(self, cell: DetectionCell) -> CleanRun:
        layout = digest_config(without_guard_and_attack(cell.run))
        if layout not in self._clean:
            steps = self._steps[layout]
            with tempfile.TemporaryDirectory(dir=self._directory) as directory:
                self._clean[layout] = run_clean(cell.run, steps, Path(directory), self._model_cache)
        return self._clean[layout]

    @property
    def _model_cache(self) -> Path:
        return self._directory / "models"


def detection_row(cell: DetectionCell, outcome: CompanyResult, clean: CleanRun) -> Row:
    """Return the result of a company as one flat row."""
    run, attack, guard = cell.run, cell.run.attack, cell.run.guard
    attacked = attack.kind != "none"
    entry = ATTACKS[attack.kind] if attacked else None
    guilty = {lie.party for lie in outcome.lies}
    blamed = {str(body["party"]) for body in outcome.bodies_of("verdict")}
    steps = {lie.step for lie in outcome.lies}
    steps_found = {lie.step for lie in outcome.lies if is_found(lie, outcome)}
    undone = {lie.step for lie in outcome.lies if is_undone(lie, outcome)}
    met_in = first_detected_step(outcome)
    return {
        "attack": attack.kind,
        "direction": None if entry is None else attack.direction or entry.direction,
        "strength": None if entry is None else attack.strength or entry.strength,
        "rate": attack.rate if attacked else None,
        "stages": list(attack.stages) if attacked else [],
        "K": run.pipeline.stages,
        "schedule": run.pipeline.schedule,
        "adapters": run.model.adapter is not None,
        "precision": run.train.precision,
        "paths": [path.name for path in cell.paths],
        "guard": cell.guard,
        "preset": guard.preset_in_force,
        "mode": guard.mode,
        "q": guard.audit_rate if guard.is_enabled else None,
        "p": guard.step_audit_rate if guard.is_enabled else None,
        "owner_audit_rate": guard.owner_audit_rate if guard.is_enabled else None,
        "tolerance": guard.tolerance if guard.is_enabled else None,
        "shadow": guard.shadow if guard.is_enabled else None,
        "expected_from": None if entry is None else entry.caught_by,
        "steps": len(outcome.losses),
        "attacked_steps": len(steps),
        "detected_steps": len(steps_found),
        "undone_steps": len(undone - steps_found),
        "steps_to_detection": None if met_in is None else met_in - min(steps),
        "corrupted_sequences_accepted": num_sequences(accepted_lies(outcome), run),
        "guilty": sorted(guilty),
        "blamed": sorted(blamed),
        "lost": [str(body["party"]) for body in outcome.bodies_of("lost")],
        "relayed": len(outcome.bodies_of("relayed")),
        "false_accusations": len(blamed - guilty),
        "caught_by": sorted({str(body["offence"]) for body in outcome.bodies_of("verdict")}),
        "evidence": [list(explained) for explained in outcome.evidence],
        "alarms": len(outcome.bodies_of("alarm")) if guard.is_enabled else None,
        "doubts": len(outcome.bodies_of("gradient_doubted")) if guard.is_enabled else None,
        "drifts": len(outcome.bodies_of("drift")) if guard.is_enabled else None,
        "audited_messages": _audited_messages(outcome) if guard.is_enabled else None,
        "compared_by_distance": None if outcome.differences is None else outcome.differences.unequal,
        "largest_distance": None if outcome.differences is None else outcome.differences.largest,
        "loss_distance": _loss_distance(outcome, clean),
        # other paths lead to other bits, without an attack too
        "bit_identical": None if cell.paths else _is_bit_identical(outcome, clean),
        "error": outcome.error,
    }


def _audited_messages(outcome: CompanyResult) -> int:
    """Count the messages that audits checked.

    An audit recomputes a microbatch both ways; one that the screen asked for recomputes the withheld message.
    """
    return 2 * outcome.num_audits - len(outcome.bodies_of("screen_hit"))


def _is_bit_identical(outcome: CompanyResult, clean: CleanRun) -> bool | None:
    """Whether the weights equal the undisturbed run's after as many steps; None when the run broke off."""
    return None if outcome.digest is None else outcome.digest == clean.digests[len(outcome.losses) - 1]


def _loss_distance(outcome: CompanyResult, clean: CleanRun) -> float | None:
    """Largest difference of the loss in any step that was not undone; None when there is no such step."""
    undone = {
        step
        for body in outcome.bodies_of("rolled_back")
        for step in range(int(str(body["to"])), int(str(body["step"])))
    }
    pairs = zip(outcome.losses, clean.losses, strict=False)
    return max((abs(a - b) for step, (a, b) in enumerate(pairs) if step not in undone), default=None)


def _besides_run(cell: DetectionCell) -> list[object]:
    return [cell.guard, cell.steps, [asdict(path) for path in cell.paths]]


def _print_cell(place: str, cell: DetectionCell, row: Row) -> None:
    print_progress(f"{place}: {_describe_row(row)}, {row['wall_s']:.0f} s")


def _describe_row(row: Row) -> str:
    place = (
        f"{row['attack']} {row['direction'] or ''} at {row['stages']} of {row['K']}, rate {row['rate']}, {row['guard']}"
    )
    if row["attack"] == "none":
        who = f"honest, K = {row['K']}, {row['schedule']}, {row['guard']}, {' / '.join(row['paths']) or 'one path'}"
        return f"{who}: {row['audited_messages']} audited messages, {row['false_accusations']} false accusations"
    came = (
        f"{row['detected_steps']} of {row['attacked_steps']} steps found, blamed {', '.join(row['blamed']) or 'nobody'}"
    )
    return f"{place}: {came}"
