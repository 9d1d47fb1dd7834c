"""``phalanx publish``: publish the states and messages that strangers need to recompute a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line

PUBLISH_EPILOG = (
    "Example: phalanx publish runs/first --out public/first --with-data --dry-run\n\n"
    "Example: phalanx publish runs/first --out public/first --every 100 --passport first.passport"
)


def publish(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory.")],
    *,
    every: Annotated[int, typer.Option(min=1, help="Smallest distance of two published states, in steps.")] = 1,
    with_data: Annotated[bool, typer.Option("--with-data", help="Publish the tokens, not their digest alone.")] = False,
    with_model: Annotated[
        bool, typer.Option("--with-model", help="Publish the files that the model began with.")
    ] = False,
    passport: Annotated[
        Path | None, typer.Option("--passport", metavar="FILE", help="Passport to bind the states to.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="The owner's keys; default: those of the run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the bytes and write nothing.")] = False,
) -> Answer:
    """Write a directory from which strangers recompute a run: signed log, certified states, and the data if you say so.

    No key, token or journal is in it. A stranger recomputes whole segments between two states, so more of them make
    an audit cheaper. Messages between stages are published nowhere: runs do not store them.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    from phalanx.governance.publication import PublicationChoice, Publisher
    from phalanx.train import PastRun

    publisher = Publisher(PastRun(run_dir), PublicationChoice(every, with_data, with_model, passport, identity))
    price = publisher.estimate_price()
    note = {name: " (left out: --with-" + name + ")" for name in price.left_out}
    rows: dict[str, Any] = {f"{name}, bytes": f"{size}{note.get(name, '')}" for name, size in price.rows.items()}
    rows |= {"to publish, bytes": price.total_bytes, "states of steps": ", ".join(map(str, price.states)) or "none"}
    print_figures({**rows, "longest segment, steps": price.longest})
    facts = {"bytes": price.rows, "left_out": price.left_out, "total": price.total_bytes, "states": price.states}
    if dry_run:
        return Answer(facts)
    publication = publisher.publish_run(out)
    print_line(f"{out}: {len(publication.manifest.files)} files, manifest {publication.digest}")
    return Answer({**facts, "publication": out, "manifest": publication.digest})
