"""``phalanx report``: the page of a run; and what its summary tells on the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import say_figures

# the figures of summary.json that are worth a line each; those a run does not have are left out
SUMMARY = (
    "status",
    "steps",
    "loss_first",
    "loss_last",
    "validation_perplexity",
    "ended_early",
    "best_checkpoint",
    "accuracy",
    "macro_f1",
    "tfidf_accuracy",
    "majority_accuracy",
    "tokens_per_s",
    "audits",
    "attacks_injected",
    "detections",
    "false_accusations",
    "evicted",
    "replaced",
    "verdicts_refused",
    "steps_redone",
    "in_doubt",
    "takeovers",
    "steps_lost",
    "final_weights_digest",
)
_OF_A_DRILL = ("attacks_injected", "detections", "false_accusations")
"""Known where attackers are started here; elsewhere a row of dashes."""


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
) -> Answer:
    """Write report.html into a run directory and print its path."""
    from phalanx.report import check_run

    # a mistake is said before torch is imported
    check_run(run_dir)
    from phalanx.report import write_report

    page = write_report(run_dir)
    typer.echo(page)
    return Answer({"report": page})


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return what a run has written down at its end; where and nothing more where it has not come to one."""
    try:
        found = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {"run_dir": str(run_dir), **found}


def say_summary(summary: Mapping[str, Any]) -> None:
    """Print what a user wants to know of ``summary.json`` on stdout."""
    known = {**summary, **summary.get("classification", {}), **_ends(summary)}
    measured = {name for name, value in known.items() if value is not None or name not in _OF_A_DRILL}
    say_figures({name: known[name] for name in SUMMARY if name in measured})


def _ends(summary: Mapping[str, Any]) -> dict[str, str]:
    """An early end and the best checkpoint in words; nothing where the run has neither."""
    stopped, best = summary.get("stopped_early"), summary.get("best_checkpoint")
    words = {} if stopped is None else {"ended_early": f"after step {stopped['step']}, by {stopped['on']}"}
    if best is not None:
        words["best_checkpoint"] = f"step {best['step']}, loss {best['loss']:.4g} on {best['on']}"
    return words
