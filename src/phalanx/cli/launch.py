"""``phalanx launch``: one run file on torchrun or on Ray."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.options import Sets, Unsets, overrides_of
from phalanx.cli.report import summary_of


def launch(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file, the same as for train.")],
    *,
    engine: Annotated[
        Literal["torchrun", "ray"], typer.Option(help="Launcher that starts and restarts the processes.")
    ] = "torchrun",
    sets: Sets = None,
    unsets: Unsets = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Output directory of the owner; default: runs/NAME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the run directory, if there is one.")
    ] = False,
    parties: Annotated[
        list[str] | None,
        typer.Option("--party", metavar="NAME", help="Parties to start here; default: all with keys in pipeline.pki."),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="HOST:PORT", help="Address of an owner that was started elsewhere."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="HOST", help="Address of this machine for the others.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option("--max-restarts", min=0, help="Maximum restarts of the owner, or of all; default: 3."),
    ] = None,
    nnodes: Annotated[
        str, typer.Option("--nnodes", metavar="N|MIN:MAX", help="torchrun: number of machines, all of one operator.")
    ] = "1",
    rendezvous: Annotated[
        str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="torchrun: address of the rendezvous.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="ADDRESS", help="Ray: address of a running cluster; default: start one here."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the processes; start nothing.")] = False,
) -> Answer:
    """Start a run's owner and workers, or the ranks of its domain, on torchrun or Ray; restart them when they die."""
    from phalanx.train import load_run

    # a mistake in the file is said before torch is imported
    overrides = tuple(overrides_of(sets, unsets))
    load_run(run_file, overrides)
    from phalanx.launch import (
        Launch,
        Nodes,
        as_domain,
        describe_ray,
        describe_torchrun,
        is_rank,
        launch_domain,
        run_on_ray,
        run_rank,
        run_torchrun,
    )

    request = Launch(
        run_file,
        overrides,
        run_dir,
        tuple(parties or ()),
        owner,
        advertise,
        resume=resume,
        max_restarts=max_restarts,
    )
    nodes = Nodes(nnodes, rendezvous)
    domain = as_domain(request)
    if domain is not None:
        code = launch_domain(domain, engine, nodes, address, dry_run=dry_run)
        return Answer({"dry_run": True} if dry_run else summary_of(domain.run_dir), code)
    if engine == "torchrun" and is_rank():
        code = run_rank(request)
        return Answer(summary_of(request.run_dir), code)
    request.check_request()
    nodes.check_launch(request)
    if dry_run:
        lines = describe_torchrun(request, nodes) if engine == "torchrun" else describe_ray(request, address)
        typer.echo("\n".join(lines))
        return Answer({"dry_run": True, "would_run": lines})
    code = run_torchrun(request, nodes) if engine == "torchrun" else run_on_ray(request, address)
    return Answer(summary_of(request.run_dir), code)
