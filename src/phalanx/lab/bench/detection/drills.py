"""``phalanx attack``: a run file's own model, data and guard against named attackers, in real processes."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.config import digest_config
from phalanx.errors import PhalanxError
from phalanx.lab.attacks import ATTACKS, attackers_of
from phalanx.lab.bench.detection.drill_plan import Drill, DrillRun, drill_scenes
from phalanx.security.crypto import certified_name
from phalanx.train import RunConfig, StagedRun, train

Train = Callable[[StagedRun, Path], dict[str, Any]]
"""Trains one run in a directory and returns its summary."""


def list_attacks() -> list[dict[str, Any]]:
    """Return every attack with its effect, its options, and the layer that must find it."""
    return [
        {
            "attack": kind,
            "what it does": (entry.attack.__doc__ or "").strip().partition("\n")[0],
            "direction": entry.direction,
            "strength": entry.strength,
            "caught by": entry.caught_by,
        }
        for kind, entry in ATTACKS.items()
    ]


def run_drill(
    run: RunConfig, drill: Drill, directory: Path | None = None, trainer: Train | None = None
) -> dict[str, Any]:
    """Train once undisturbed and once with each attacker; progress goes to standard error.

    Args:
        directory: Keeps the run directories; a temporary one when left out.
        trainer: Trains one run; `phalanx.train.train` when left out.

    With remote workers it says before each run how they are to be started, and waits for them.

    Returns:
        One row an attack, the undisturbed run first, and `passed`: every attack was found, and no honest party blamed.
    """
    scenes = drill_scenes(run, drill)
    with tempfile.TemporaryDirectory(prefix="phalanx-attack-") as temporary:
        home = directory or Path(temporary)
        summaries = {
            name: _train_scene(name, drill_scene, home / name, trainer or train_quietly)
            for name, drill_scene in scenes.items()
        }
    clean = summaries["none"]
    rows = [{"attack": name, **drill_row(scenes[name], summary, clean)} for name, summary in summaries.items()]
    return {
        "run": digest_config(run),
        "steps": drill.steps,
        "passed": all(map(has_guard_held, rows)),
        "rows": rows,
    }


def drill_row(scene: DrillRun, summary: dict[str, Any], clean: dict[str, Any]) -> dict[str, Any]:
    """Make one line of the table from two summaries, but for its name.

    Remote liars alone know their lies: their run is compared with their orders.
    """
    planned, liars = scene.planned_steps, set(scene.liars)
    attacked = planned if scene.is_remote else summary.get("attacked_steps") or []
    # a silent party is replaced and not accused
    out = {certified_name(name) for name in (*summary.get("evicted", ()), *summary.get("lost", ()))}
    blamed = {certified_name(verdict["party"]) for verdict in summary.get("verdicts", ())}
    caught_at = [verdict["step"] for verdict in summary.get("verdicts", ())]
    digests = summary.get("final_weights_digest"), clean.get("final_weights_digest")
    each_way = [{party for party, attack in scene.liars.items() if attack == way} for way in scene.liars.values()]
    return {
        "liars": {name: attack.model_dump(mode="json", exclude={"also"}) for name, attack in scene.liars.items()},
        "planned_steps": len(planned),
        "attacked_steps": None if scene.is_remote else len(attacked),
        "detected": all(out & parties for parties in each_way) if attacked else None,
        "blamed": sorted({verdict["party"] for verdict in summary.get("verdicts", ())}),
        "caught_by": sorted({verdict["offence"] for verdict in summary.get("verdicts", ())}),
        "steps_to_detection": min(caught_at) - min(attacked) if caught_at and attacked else None,
        "evicted": summary.get("evicted", []),
        "lost": summary.get("lost", []),
        "false_accusations": len(blamed - liars) if scene.is_remote else summary.get("false_accusations"),
        "bit_identical": None if None in digests else digests[0] == digests[1],
        "perplexity": summary.get("validation_perplexity"),
        "audits": summary.get("audits"),
        "error": summary.get("error"),
    }


def has_guard_held(row: dict[str, Any]) -> bool:
    """Whether the run ended without an honest party blamed, and the attack took place and was found."""
    is_found = row["detected"] is True or row["attack"] == "none"
    return row["error"] is None and row["false_accusations"] == 0 and is_found


def _train_scene(kind: str, scene: DrillRun, directory: Path, trainer: Train) -> dict[str, Any]:
    sys.stderr.write(f"attack: {kind}: {scene.run.train.steps} steps\n")
    if scene.is_remote:
        sys.stderr.write(f"{scene.start_instructions()}\n")
    sys.stderr.flush()
    try:
        return trainer(scene.run, directory)
    except PhalanxError as exc:
        if kind == "none":
            raise
        # a run that breaks off still leaves behind what it had found
        return _read_summary(directory) | {"error": f"{type(exc).__name__}: {exc}"}


def _read_summary(directory: Path) -> dict[str, Any]:
    summary = directory / "summary.json"
    content: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return content


def train_quietly(run: StagedRun, directory: Path) -> dict[str, Any]:
    """Train one run; its progress goes to standard error."""
    return train(run, directory, console=Console(stderr=True), open_workers=attackers_of(run.attack, home=run.home))
