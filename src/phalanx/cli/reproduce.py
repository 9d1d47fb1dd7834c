"""``phalanx reproduce``: a table of a paper, trained here; and what leaks of a split or a pipeline, measured here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows, write_json
from phalanx.errors import ConfigError

_LATER = BACKDOOR, DOMAINS, LEAKS, MEDICAL, STAGE_LEAKS = "backdoor", "domains", "leaks", "medical", "stage-leaks"
_COMPARED = (MEDICAL, DOMAINS)
_SIZES_WITH_FILES = ("full", "learned")
_LEGENDS = {
    BACKDOOR: "held-out text; success: mean (least-most) over the seeds of the target following the trigger",
    LEAKS: "what the host of a split recovers from the messages that cross the cut",
    STAGE_LEAKS: "per cent that each middle stage of a pipeline recovers from its messages; loss: held-out text, nats",
    MEDICAL: "accuracy and macro-F1 on test texts, mean ± half of the 95 % interval over the seeds",
    DOMAINS: "accuracy and macro-F1 on test texts, mean ± half of the 95 % interval over the seeds",
    "": "perplexity on held-out text, best epoch / last epoch; below: least-most over the seeds",
}


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="vulnerability, defence, medical, domains, leaks, stage-leaks or backdoor."
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: at most 10 minutes on 2 cores.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Models of 0.4 M parameters, built-in texts.")] = False,
    learned: Annotated[
        bool, typer.Option("--learned", help="Models that have learned, at sizes for 2 cores (defence, vulnerability).")
    ] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Train nothing; print finished cells.")] = False,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write JSON to this file.")] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of data files.")] = None,
) -> Answer:
    """Train or measure a table and print it; repeat the command to continue after an interruption."""
    flags = [name for name, flag in (("quick", quick), ("small", small), ("learned", learned)) if flag]
    if len(flags) > 1:
        raise ConfigError(f"reproduce: --{' and --'.join(flags)} exclude each other; choose one").with_facts(
            code="PHX-C002"
        )
    size = flags[0] if flags else "full"
    if size in ("small", "learned") and table in (BACKDOOR, LEAKS, STAGE_LEAKS):
        raise ConfigError(f"reproduce: {table} has no size {size!r}; use --quick or neither")
    if data is not None and not (table in _COMPARED or (table not in _LATER and size in _SIZES_WITH_FILES)):
        raise ConfigError(f"reproduce: {table} reads no data files at size {size!r}; leave --data out")
    if table in _COMPARED:
        result, tables = _reproduce_medical(table, size, finished, data)
    elif table == BACKDOOR:
        result, tables = _reproduce_backdoor(size, finished)
    elif table == LEAKS:
        result, tables = _reproduce_leaks(size, finished)
    elif table == STAGE_LEAKS:
        result, tables = _reproduce_stage_leaks(size, finished)
    else:
        result, tables = _reproduce_lu(table, size, finished, data)
    if out is not None:
        write_json(out, result)
    typer.echo(_LEGENDS.get(table, _LEGENDS[""]))
    for title, lines in tables.items():
        typer.echo(f"\n{title}")
        print_rows(lines)
    if result.get("comparisons"):
        typer.echo("\ndifferences of accuracy, paired by seed")
        print_rows(result["comparisons"])
    print_figures({key: result[key] for key in ("command", "commit", "load", "missing", "absent") if key in result})
    return Answer(result)


def _reproduce_lu(table: str, size: str, finished: bool, data: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lu et al. 2023."""
    from phalanx.lab.reproduce import CELLS, as_tables
    from phalanx.lab.reproduce import reproduce as train_table

    if table not in CELLS:
        raise ConfigError(
            f"reproduce: unknown table {table!r}; choices: {', '.join(sorted((*CELLS, *_LATER)))}"
        ).with_facts(code="PHX-C002", key="TABLE", found=table)
    result = train_table(table, size=size, only_finished=finished, home=data)
    return result, as_tables(result["summary"])


def _reproduce_medical(
    table: str, size: str, finished: bool, data: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Secure split fine-tuning, compared with what else there is."""
    from phalanx.lab.reproduce.medical import DOMAIN_SIZES, SIZES, as_tables, reproduce_medical

    sizes = SIZES if table == MEDICAL else DOMAIN_SIZES
    if size not in sizes:
        raise ConfigError(f"reproduce: {table} has no size {size!r}; choices: {', '.join(sizes)}")
    result = reproduce_medical(size=size, only_finished=finished, home=data, table=table)
    return result, as_tables(result["summary"])


def _reproduce_leaks(size: str, finished: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the host of a split recovers."""
    from phalanx.lab.reproduce.leaks import adapter_lines, as_lines, measure_leaks

    result = measure_leaks(size=size, only_finished=finished)
    title = str(result["model"]["name"])
    return result, {
        f"{title}: tokens that the best attack recovers, and each attack's own share of plaintext": as_lines(
            result["summary"]
        ),
        f"{title}: tokens of a batch that its adapter's gradient gives away": adapter_lines(result["adapters"]),
    }


def _reproduce_stage_leaks(size: str, finished: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the middle stages of a pipeline recover."""
    from phalanx.lab.reproduce.stage_leaks import measure_stage_leaks, price_lines, stage_lines

    result = measure_stage_leaks(size=size, only_finished=finished)
    return result, {**stage_lines(result["summary"]), "one boundary on one core": price_lines(result["prices"])}


def _reproduce_backdoor(size: str, finished: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A backdoor that one stage plants, with each guard and after each removal."""
    from phalanx.lab.reproduce.backdoor import as_tables, reproduce_backdoor

    return (result := reproduce_backdoor(size=size, only_finished=finished)), as_tables(result["summary"])
