"""``phalanx doctor``: is this machine fit to train, and what will be slow."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer

NOT_FIT = 3


def doctor(
    directory: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Directory for runs, to check its disk.")
    ] = Path("runs"),
    *,
    identity: Annotated[
        list[Path] | None,
        typer.Option("--identity", metavar="DIR", help="Also check these keys and certificates; may be repeated."),
    ] = None,
) -> Answer:
    """Check this machine: devices, memory, disk, extras, ports, clock, trusted hardware, certificates."""
    from phalanx.launch import check_machine

    findings = check_machine(directory, identity or ())
    for finding in findings:
        typer.echo(f"{finding.state:<7} {finding.about:<12} {finding.found}")
        if finding.advice:
            typer.echo(f"{'':<20} -> {finding.advice}")
    is_bad = any(finding.state == "bad" for finding in findings)
    return Answer({"findings": [finding.as_row() for finding in findings]}, NOT_FIT if is_bad else 0)
