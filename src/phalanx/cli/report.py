"""``phalanx report``: the page of a run; and what its summary tells on the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures

# the figures of summary.json that are worth a line each; those a run does not have are left out
SUMMARY = (
    "status",
    "worse_than_before",
    "steps",
    "rounds",
    "sites",
    "excluded",
    "loss_first",
    "loss_last",
    "validation_perplexity",
    "ended_early",
    "best_checkpoint",
    "accuracy",
    "accuracy_first",
    "margin",
    "margin_first",
    "macro_f1",
    "tfidf_accuracy",
    "majority_accuracy",
    "privacy",
    "epsilon_spent",
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
"""Of use where attackers are started here; of any other run they say that nobody was started."""
_OF_A_GUARD = ("audits", "evicted", "replaced", "verdicts_refused", "steps_redone", "in_doubt", "takeovers")
_WHERE_THERE_IS_ONE = ("worse_than_before", "excluded", "evicted", "replaced", "verdicts_refused", "takeovers")
"""Rows that say something where they are not empty, or not zero."""


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
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
    """Return the summary of a run; the run directory alone if the run has not ended."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    return {"run_dir": str(run_dir), **summary}


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the main rows of ``summary.json`` on stdout; rows that the run does not have are left out."""
    all_values = {
        **summary,
        **_score_rows(summary),
        **_ending_rows(summary),
        **_round_rows(summary),
        **_privacy_rows(summary),
    }
    all_values["worse_than_before"] = ", ".join(summary.get("worse_than_before") or ())
    shown = {name: value for name in SUMMARY if (value := all_values.get(name)) is not None}
    if not all_values.get("attacks_injected"):
        # a conviction of nobody's attacker stays: it is a false one
        shown = {name: value for name, value in shown.items() if name not in _OF_A_DRILL or value}
    if summary.get("guard") == "off":
        shown = {name: value for name, value in shown.items() if name not in _OF_A_GUARD}
    print_figures({name: value for name, value in shown.items() if value or name not in _WHERE_THERE_IS_ONE})


def _score_rows(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of a classifier, or of a model of pairs, on held-out rows."""
    pairs = summary.get("preferences")
    # what a classifier had before is in its report
    classes = {key: value for key, value in summary.get("classification", {}).items() if not key.endswith("_first")}
    return {**classes, **({} if not isinstance(pairs, dict) else pairs)}


def _round_rows(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a federated run in its own words: a step of it is a round."""
    rounds = summary.get("federated")
    if not isinstance(rounds, dict):
        return {}
    from phalanx.config import join_names

    out = ", ".join(f"{site}: {reason}" for site, reason in rounds["excluded"].items())
    sites = f"{join_names(rounds['sites'])}; {rounds['asked']} asked a round; the owner sees {rounds['owner_sees']}"
    return {"steps": None, "steps_lost": None, "rounds": summary.get("steps"), "sites": sites, "excluded": out}


def _privacy_rows(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the protected party of a privacy bound, and the spent budget."""
    privacy = summary.get("privacy")
    if not isinstance(privacy, dict):
        return {}
    return {
        "privacy": f"protects {privacy.get('example', 'one training row')}",
        "epsilon_spent": f"{privacy['epsilon_spent']:.4g} of {privacy['epsilon']:g} at delta {privacy['delta']:g}",
    }


def _ending_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Describe an early end and the best checkpoint; empty where the run has neither."""
    stopped, best = summary.get("stopped_early"), summary.get("best_checkpoint")
    rows = {} if stopped is None else {"ended_early": f"after step {stopped['step']}, by {stopped['on']}"}
    if best is not None:
        rows["best_checkpoint"] = f"step {best['step']}, loss {best['loss']:.4g} on {best['on']}"
    return rows
