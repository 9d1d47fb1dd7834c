"""``phalanx plan --split``: where to cut between clients and an enclave, and how the answer is printed."""

from pathlib import Path
from typing import Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.planning.run_file import question_from_run
from phalanx.config import load_config
from phalanx.errors import ConfigError
from phalanx.planner.cluster.local import this_machine
from phalanx.planner.cuts import CutAnswer, Parties, ask_cuts, parties_here, read_leaks
from phalanx.planner.search.question import Question, about_model

_SHOWN = 15


def split_question(
    run_file: Path | None,
    overrides: list[str],
    model: str | None,
    sequences: int,
    sequence_length: int,
    precision: str,
) -> Question:
    """Return model and recipe, with client and enclave as two ranks of this machine."""
    here = this_machine(2)
    if run_file is not None:
        # what is trained in the back is the parties' to say
        return question_from_run(run_file, overrides, here, adapts=False)[0]
    return about_model(model or "", here, sequences, sequence_length, precision)


def is_of_split(
    run_file: Path | None, overrides: list[str], is_split: bool, of_split: dict[str, Any], of_layouts: dict[str, Any]
) -> bool:
    """Whether a cut is asked for, by --split or by ``[split]``; options by name, None where one is not given.

    Raises:
        ConfigError: Options about the one are given where the other is planned; or the file is wrong.
    """
    from phalanx.train import SplitRun, load_run

    has_split = run_file is not None and isinstance(load_run(run_file, overrides), SplitRun)
    if not is_split and not has_split:
        if any(value is not None for value in of_split.values()):
            raise ConfigError("plan: --parties, --cut and --leaks need --split; add it").with_facts(code="PHX-C002")
        return False
    stray = [name for name, value in of_layouts.items() if value is not None]
    if stray:
        why = "--split is given" if is_split else f"{run_file} has [split]"
        raise ConfigError(
            f"plan: {', '.join(stray)}: only valid for layouts of ranks, but {why}; remove it"
        ).with_facts(code="PHX-C002")
    if not is_split:
        typer.echo(f"{run_file} has [split]: the plan is for its cut between clients and enclave", err=True)
    return True


def propose_cut(asked: Question, parties: Path | None, cut: int | None, leaks: Path | None) -> Answer:
    """Judge every cut and print them; fail, with the nearest one that works, where the one asked for does not."""
    party_table = parties_here(asked.cluster) if parties is None else load_config(parties, Parties)
    answer = ask_cuts(asked.model, asked.shape, asked.recipe, party_table, read_leaks(leaks))
    try:
        best = answer.require_cut(cut)
    except ConfigError as exc:
        return Answer(answer.as_json(), error=exc)
    rows = [best] if cut is not None else answer.usable_cuts[:_SHOWN]
    print_rows([_cut_row(cut_row.cut_row()) for cut_row in rows])
    print_figures(_cut_figures(answer, best.depth))
    typer.echo("Estimates; the leaks were measured on the model named above. --json lists the assumptions.")
    return Answer(answer.as_json())


def _cut_figures(answer: CutAnswer, best: int) -> dict[str, Any]:
    refused = [cut for cut in answer.cuts if cut.reason is not None]
    return {
        "cut": best,
        "mode": answer.parties.mode,
        "usable": len(answer.usable_cuts),
        "refused": len(refused),
        **{f"  {cut.depth}": cut.reason for cut in refused[:3]},
        "leaks measured on": f"{answer.leaks.model.name}, by {answer.leaks.command}",
    }


def _cut_row(row: dict[str, Any]) -> dict[str, Any]:
    figures = {"step_s": "step s", "client_gib": "client GiB", "enclave_gib": "enclave GiB", "wire_mb": "MB a step"}
    shares = {"leak": "leak", "leak_if_opened": "if opened", "chance": "chance"}
    return (
        {"cut": row["cut"], "m": row["microbatches"]}
        | {title: f"{row[key]:.3g}" for key, title in figures.items()}
        | {title: f"{100 * row[key]:.1f} %" for key, title in shares.items()}
        | {"leak is": row["leak_basis"]}
    )
