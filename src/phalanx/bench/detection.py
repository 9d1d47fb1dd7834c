"""``phalanx bench detection``: who is caught, when, and whether anybody innocent is blamed; all in one process."""

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.attacks import ATTACKS
from phalanx.bench.cells import GUARDS, Cell, cells
from phalanx.bench.duel import (
    CleanRun,
    Outcome,
    accepted,
    is_found,
    is_undone,
    play,
    run_clean,
    sequences,
    undisturbed,
)
from phalanx.bench.machine import current_commit, describe_machine, load_average
from phalanx.config import digest
from phalanx.pipeline import keep_freed_memory
from phalanx.train.process import deterministic

Row = dict[str, Any]


def bench_detection(quick: bool) -> dict[str, Any]:
    """Play every attack of the table and honest companies; progress goes to standard error.

    Args:
        quick: One rate and one place; ends within 10 minutes on 2 cores.

    Returns:
        Rows, and the block `false_accusations_per_million`; a figure that was not measured is None.
    """
    return measure(cells(quick=quick), quick=quick)


def measure(what: Sequence[Cell], *, quick: bool) -> dict[str, Any]:
    """Play these cells; see `bench_detection`."""
    load = load_average()
    started = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory, deterministic(threads=1):
        keep_freed_memory()
        field = _Field(what, Path(directory))
        for number, cell in enumerate(what):
            rows.append(field.row(cell, number))
            _say(f"{number + 1} of {len(what)}: {_in_words(rows[-1])}")
    return {
        "name": "detection",
        "quick": quick,
        "command": f"phalanx bench detection --json{' --quick' if quick else ''}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "wall_s": time.monotonic() - started,
        "guards": {name: guard.model_dump(mode="json") for name, guard in GUARDS.items()},
        "false_accusations_per_million": false_accusations_per_million(rows),
        "rows": rows,
    }


def false_accusations_per_million(rows: Iterable[Row]) -> dict[str, Any]:
    """Accusations of the innocent by the number of audited messages, for audited guards.

    Returns:
        The share per million and what it is made of; `at_most` is the bound that holds with 95 % certainty when
        there was none (the rule of three).
    """
    audited = [row for row in rows if row["audited_messages"]]
    messages = sum(row["audited_messages"] for row in audited)
    count = sum(row["false_accusations"] for row in audited)
    honest = [row for row in audited if row["attack"] == "none"]
    return {
        "value": 1e6 * count / messages if messages else None,
        "false_accusations": count,
        "audited_messages": messages,
        "audited_messages_of_honest_companies": sum(row["audited_messages"] for row in honest),
        "at_most": 3e6 / messages if messages and not count else None,
    }


class _Field:
    """Where companies are played; the undisturbed run is trained once for each layout, as long as any cell needs."""

    def __init__(self, what: Iterable[Cell], directory: Path) -> None:
        self._directory = directory
        self._clean: dict[str, CleanRun] = {}
        self._steps: dict[str, int] = {}
        for cell in what:
            layout = digest(undisturbed(cell.run))
            self._steps[layout] = max(cell.steps, self._steps.get(layout, 0))

    def row(self, cell: Cell, number: int) -> Row:
        """Play a cell and compare it with the undisturbed run of the same seed."""
        return row_of(cell, play(cell, self._empty(f"{number}"), self._cache), self._clean_run(cell))

    def _clean_run(self, cell: Cell) -> CleanRun:
        layout = digest(undisturbed(cell.run))
        if layout not in self._clean:
            steps = self._steps[layout]
            self._clean[layout] = run_clean(cell.run, steps, self._empty(f"clean-{layout}"), self._cache)
        return self._clean[layout]

    def _empty(self, name: str) -> Path:
        directory = self._directory / name
        directory.mkdir()
        return directory

    @property
    def _cache(self) -> Path:
        return self._directory / "models"


def row_of(cell: Cell, outcome: Outcome, clean: CleanRun) -> Row:
    """What a company came to, as one flat row."""
    run, attack, guard = cell.run, cell.run.attack, cell.run.guard
    attacked = attack.kind != "none"
    line = ATTACKS[attack.kind] if attacked else None
    guilty = {lie.party for lie in outcome.lies}
    blamed = {str(body["party"]) for body in outcome.bodies("verdict")}
    steps = {lie.step for lie in outcome.lies}
    found = {lie.step for lie in outcome.lies if is_found(lie, outcome)}
    undone = {lie.step for lie in outcome.lies if is_undone(lie, outcome)}
    return {
        "attack": attack.kind,
        "direction": None if line is None else attack.direction or line.direction,
        "rate": attack.rate if attacked else None,
        "stages": list(attack.stages) if attacked else [],
        "K": run.pipeline.stages,
        "schedule": run.pipeline.schedule,
        "adapters": run.model.adapter is not None,
        "numeric_classes": cell.num_classes,
        "guard": cell.guard,
        "mode": guard.mode,
        "q": guard.audit_rate if guard.audits else None,
        "p": guard.step_audit_rate if guard.audits else None,
        "owner_audit_rate": guard.owner_audit_rate if guard.audits else None,
        "shadow": guard.shadow if guard.enabled else None,
        "expected_from": None if line is None else line.caught_by,
        "steps": len(outcome.losses),
        "attacked_steps": len(steps),
        "detected_steps": len(found),
        "undone_steps": len(undone - found),
        "steps_to_detection": min(found) - min(steps) if found else None,
        "corrupted_sequences_accepted": sequences(accepted(outcome), run),
        "guilty": sorted(guilty),
        "blamed": sorted(blamed),
        "lost": [str(body["party"]) for body in outcome.bodies("lost")],
        "relayed": len(outcome.bodies("relayed")),
        "false_accusations": len(blamed - guilty),
        "caught_by": sorted({str(body["offence"]) for body in outcome.bodies("verdict")}),
        "audited_messages": _audited_messages(outcome) if guard.audits else None,
        "loss_distance": _loss_distance(outcome, clean),
        "bit_identical": _is_bit_identical(outcome, clean),
        "error": outcome.error,
    }


def _audited_messages(outcome: Outcome) -> int:
    """An audit recomputes a microbatch both ways; one that a screen asked for, the suspected message."""
    return 2 * outcome.num_audits - len(outcome.bodies("screen_hit"))


def _is_bit_identical(outcome: Outcome, clean: CleanRun) -> bool | None:
    """Whether the weights are those of the undisturbed run after as many steps; None when the run broke off."""
    return None if outcome.digest is None else outcome.digest == clean.digests[len(outcome.losses) - 1]


def _loss_distance(outcome: Outcome, clean: CleanRun) -> float | None:
    """Largest difference of the loss in any step that was not undone; None when there is no such step."""
    undone = {
        step for body in outcome.bodies("rolled_back") for step in range(int(str(body["to"])), int(str(body["step"])))
    }
    pairs = zip(outcome.losses, clean.losses, strict=False)
    return max((abs(a - b) for step, (a, b) in enumerate(pairs) if step not in undone), default=None)


def _in_words(row: Row) -> str:
    where = (
        f"{row['attack']} {row['direction'] or ''} at {row['stages']} of {row['K']}, rate {row['rate']}, {row['guard']}"
    )
    if row["attack"] == "none":
        return f"honest, K = {row['K']}, {row['schedule']}, {row['guard']}: {row['audited_messages']} audited messages"
    came = (
        f"{row['detected_steps']} of {row['attacked_steps']} steps found, blamed {', '.join(row['blamed']) or 'nobody'}"
    )
    return f"{where}: {came}"


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
