"""``phalanx attack``: a run file's own model, data and guard against named attackers, in real processes."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.attacks import ATTACKS, check_attack
from phalanx.config import digest
from phalanx.errors import ConfigError, PhalanxError
from phalanx.pipeline import AttackConfig
from phalanx.train import RunConfig, train

DEFAULT_KINDS = ("forward_sign_flip", "backward_gaussian")

Train = Callable[[RunConfig, Path], dict[str, Any]]
"""Trains one run in a directory and returns its summary."""


@dataclass(frozen=True)
class Drill:
    """What is done to a run file.

    Attributes:
        kinds: Names in `ATTACKS`.
        steps: Optimizer steps of each run.
        from_step: First step in which anybody lies.
        rate: How often the attackers lie.
        stages: Where they are; None for the first middle stage, or the first two where two are needed.
    """

    kinds: Sequence[str] = DEFAULT_KINDS
    steps: int = 16
    from_step: int = 4
    rate: float = 1.0
    stages: Sequence[int] | None = None


def list_attacks() -> list[dict[str, Any]]:
    """Every attack with what it does, what can be chosen about it, and the layer that must find it."""
    return [
        {
            "attack": kind,
            "what it does": (line.attack.__doc__ or "").strip().partition("\n")[0],
            "direction": line.direction,
            "strength": line.strength,
            "caught by": line.caught_by,
        }
        for kind, line in ATTACKS.items()
    ]


def drill_runs(run: RunConfig, drill: Drill) -> dict[str, RunConfig]:
    """The shortened run without an attacker, as "none", and with each.

    Raises:
        ConfigError: An attack is unknown or does not fit the run.
    """
    optimizer = run.optimizer.model_copy(update={"warmup_steps": min(run.optimizer.warmup_steps, drill.steps - 1)})
    short = {
        "train": run.train.model_copy(update={"steps": drill.steps, "validate_every": 0}),
        "optimizer": optimizer,
        "checkpoint": run.checkpoint.model_copy(update={"every": 0}),
    }
    if drill.steps <= drill.from_step:
        raise ConfigError(f"attack: {drill.steps} steps, and nobody lies before step {drill.from_step}; raise --steps")
    if not drill.kinds:
        raise ConfigError("attack: no attack is named; give --kinds, or leave it out for the default ones")
    if run.pipeline.remote_workers:
        raise ConfigError("attack: pipeline.remote_workers cannot be told to lie; leave them out of the run file")
    attacks = {kind: _attack(kind, drill) for kind in drill.kinds}
    for attack in attacks.values():
        check_attack(attack)
    # parsed again, so that what is said about stages and steps is checked for each
    everything = {"none": AttackConfig(), **attacks}
    return {kind: _checked(run, {**short, "attack": attack}) for kind, attack in everything.items()}


def run_drill(
    run: RunConfig, drill: Drill, directory: Path | None = None, trainer: Train | None = None
) -> dict[str, Any]:
    """Train once undisturbed and once with each attacker; progress goes to standard error.

    Args:
        run: From a run file.
        drill: What is done to it.
        directory: Keeps the run directories; a temporary one when left out.
        trainer: Trains one run; `phalanx.train.train` when left out.

    Returns:
        One row an attack, the undisturbed run first, and `passed`: every attack was found, and nobody innocent blamed.

    Raises:
        ConfigError: As `drill_runs`.
        PhalanxError: The undisturbed run failed.
    """
    runs = drill_runs(run, drill)
    with tempfile.TemporaryDirectory(prefix="phalanx-attack-") as temporary:
        home = directory or Path(temporary)
        summaries = {kind: _train(kind, one, home / kind, trainer or _train_quietly) for kind, one in runs.items()}
    clean = summaries["none"]
    rows = [row_of(runs[kind].attack, summary, clean) for kind, summary in summaries.items()]
    return {
        "run": digest(run),
        "steps": drill.steps,
        "rate": drill.rate,
        "passed": all(map(has_held, rows)),
        "rows": rows,
    }


def row_of(attack: AttackConfig, summary: dict[str, Any], clean: dict[str, Any]) -> dict[str, Any]:
    """One line of the table from two summaries."""
    attacked = summary.get("attacked_steps") or []
    attackers = {f"worker-{stage}" for stage in attack.stages}
    # whoever was silent is replaced and not accused
    out = attackers & {*summary.get("evicted", ()), *summary.get("lost", ())}
    caught_at = [verdict["step"] for verdict in summary.get("verdicts", ())]
    digests = summary.get("final_weights_digest"), clean.get("final_weights_digest")
    return {
        "attack": attack.kind,
        "attacked_steps": len(attacked),
        "detected": bool(out) if attacked else None,
        "blamed": sorted({verdict["party"] for verdict in summary.get("verdicts", ())}),
        "caught_by": sorted({verdict["offence"] for verdict in summary.get("verdicts", ())}),
        "steps_to_detection": min(caught_at) - min(attacked) if caught_at and attacked else None,
        "evicted": summary.get("evicted", []),
        "lost": summary.get("lost", []),
        "false_accusations": summary.get("false_accusations"),
        "bit_identical": None if None in digests else digests[0] == digests[1],
        "perplexity": summary.get("validation_perplexity"),
        "audits": summary.get("audits"),
        "error": summary.get("error"),
    }


def has_held(row: dict[str, Any]) -> bool:
    """Whether the run ended with nobody innocent blamed, and the attack took place and was found."""
    found = row["detected"] is True or row["attack"] == "none"
    return row["error"] is None and row["false_accusations"] == 0 and found


def _attack(kind: str, drill: Drill) -> AttackConfig:
    attack = AttackConfig(kind=kind, rate=drill.rate, from_step=drill.from_step, stages=tuple(drill.stages or (1,)))
    if drill.stages is None:
        try:
            check_attack(attack)
        except ConfigError:
            return attack.model_copy(update={"stages": (1, 2)})
    return attack


def _checked(run: RunConfig, update: dict[str, Any]) -> RunConfig:
    # only what was written: sections exclude each other by their presence
    sections = {name: getattr(run, name) for name in run.model_fields_set} | update
    try:
        return RunConfig(**sections)
    except ValueError as exc:
        raise ConfigError(f"attack: the run file does not allow it: {exc}") from exc


def _train(kind: str, run: RunConfig, directory: Path, trainer: Train) -> dict[str, Any]:
    sys.stderr.write(f"attack: {kind}: {run.train.steps} steps\n")
    sys.stderr.flush()
    try:
        return trainer(run, directory)
    except PhalanxError as exc:
        if kind == "none":
            raise
        # a run that breaks off still leaves behind what it had found
        return _left_behind(directory) | {"error": f"{type(exc).__name__}: {exc}"}


def _left_behind(directory: Path) -> dict[str, Any]:
    summary = directory / "summary.json"
    found: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return found


def _train_quietly(run: RunConfig, directory: Path) -> dict[str, Any]:
    return train(run, directory, console=Console(stderr=True))
