"""``phalanx calibrate``: how far honest computations of one message differ, and the tolerance they ask for."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows, write_json
from phalanx.cli.options import Sets, Unsets, overrides_of
from phalanx.errors import ConfigError

OPERATORS = ("attention", "mlp", "linear", "norm")


def calibrate(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")],
    sets: Sets = None,
    unsets: Unsets = None,
    quick: Annotated[bool, typer.Option("--quick", help="128 messages instead of 512; no torch.compile.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write JSON to this file.")] = None,
) -> Answer:
    """Measure how far honest recomputations differ on this machine, and suggest guard.tolerance.

    Compares threads, attention kernels, oneDNN, torch.compile, bf16, float64 and a GPU where there is one; distances
    are the guard's, the largest over the tokens of a message.
    """
    from phalanx.train import PipelineRun, load_run

    # a mistake in the file is said before torch is imported
    run = load_run(run_file, overrides_of(sets, unsets))
    run.require_steps("phalanx calibrate")
    if not isinstance(run, PipelineRun):
        raise ConfigError(f"{run_file}: [{run.engine}] has no guard to calibrate; take a run file of a pipeline")
    from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
    from phalanx.lab.calibrate import calibrate as measure

    changes = [*(f"--unset {key}" for key in unsets or ()), *(f"--set {text}" for text in sets or ())]
    arguments = ["phalanx calibrate", str(run_file), *changes, *["--quick"] * quick]
    provenance = {"command": " ".join(arguments), "machine": describe_machine(), "commit": current_commit()}
    result = provenance | {"load": load_average()} | measure(run, quick=quick)
    if out is not None:
        write_json(out, result)
    _print_calibration(result)
    return Answer(result)


def _print_calibration(result: dict[str, Any]) -> None:
    print_rows([_message_row(row) for row in result["rows"]])
    print_rows(_operator_rows(result["operators"]))
    print_rows(result["thresholds"])
    drifting = [row for row in result["rows"] if row["drift_alarms"]]
    print_figures({f"drift alarms: {_pair_label(row)}, {row['direction']}": row["drift_alarms"] for row in drifting})
    print_figures({f"not measured: {path}": reason for path, reason in result["absent"].items()})
    suggested = result["suggested"]
    if suggested["tolerance"] is None:
        typer.echo(f"no tolerance suggested for {result['precision']}: {suggested['reason']}")
        return
    typer.echo(f"\n[guard]\ntolerance = {suggested['tolerance']:.0e}  # {result['precision']}: {suggested['reason']}")


def _pair_label(row: dict[str, Any]) -> str:
    path, reference = str(row["path"]), str(row["reference"])
    return path if path.startswith(reference) else f"{path} against {reference}"


def _message_row(row: dict[str, Any]) -> dict[str, str]:
    shown = {"path": _pair_label(row), "": row["direction"], "messages": str(row["num_messages"])}
    shown["bit-equal"] = f"{100 * row['share_bit_equal']:.3g} %"
    columns = {"q50": "median", "max": "max", "tau_1_per_million": "tau, 1 in 10^6"}
    return shown | {title: "-" if row[key] is None else f"{row[key]:.1e}" for key, title in columns.items()}


def _operator_rows(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Largest difference of each kind of operator on its reference's inputs, one row for each pair."""
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        table.setdefault(_pair_label(row), {})[row["operator"]] = f"{row['max']:.1e}"
    return [{"operators": pair} | {kind: errors.get(kind, "-") for kind in OPERATORS} for pair, errors in table.items()]
