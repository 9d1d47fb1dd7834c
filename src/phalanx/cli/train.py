"""``phalanx train``: one run file to one run directory."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.child import PARENT, die_with_parent
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line, print_page, print_warnings
from phalanx.cli.files import name_file_in_errors
from phalanx.cli.forking import one_blas_thread, worker_opener
from phalanx.cli.options import RunDir, Sets, Unsets, overrides_of
from phalanx.cli.report import print_summary, summary_of
from phalanx.errors import InputError

if TYPE_CHECKING:
    from phalanx.cli.planning.recut import StageCutter
    from phalanx.train import RunConfig

EXIT_CODE_OF = {"completed": 0, "failed": 6, "interrupted": 130}


def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")],
    *,
    sets: Sets = None,
    unsets: Unsets = None,
    run_dir: RunDir = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last good checkpoint of the run directory.")
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", metavar="STEP", help="With --resume: discard the checkpoints of later steps."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN_DIR", help="Start from the weights of another run; stages and guard may differ."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Ranks of [parallel] to start, between min_dp and max_dp."),
    ] = None,
    recut: Annotated[
        bool,
        typer.Option("--recut", help="When workers come or go for good, cut the layers into as many stages and go on."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print config, stages and memory; train nothing.")] = False,
) -> Answer:
    """Train a model across stages that check each other, then write the report."""
    from phalanx.train import DomainRun, check_inputs, default_directory, load_run, text_warnings

    # a mistake is said before torch is imported
    overrides = tuple(overrides_of(sets, unsets))
    with name_file_in_errors(run_file):
        run = load_run(run_file, overrides)
        check_inputs(run)
    print_warnings(text_warnings(run))
    cutter = _make_cutter(run, run_dir or default_directory(run)) if recut else None
    if not dry_run:
        _check_directory(run, run_dir, resume=resume)
    if from_run is not None:
        from phalanx.train.records.run_directory import run_name

        run_name(from_run)
    if {PARENT, "TORCHELASTIC_RUN_ID"} & set(os.environ):
        # started by an engine: a second owner must never meet this one in the same directory
        die_with_parent()
    with one_blas_thread():
        from phalanx.report import write_report
        from phalanx.train import describe_run, drill_result, join_as_rank, plays_rank
        from phalanx.train import train as train_run

    _check_attack(run)
    if dry_run:
        print_page(describe_run(run))
        return Answer({"dry_run": True, "config": run.model_dump(mode="json")})
    if plays_rank(run):
        join_as_rank(run, run_dir)
        return Answer({"follows": True})
    if isinstance(run, DomainRun):
        from phalanx.launch import DomainLaunch, find_open_return, is_supervised_here, resumes_run, supervise_domain

        domain = DomainLaunch(run_file, overrides, run_dir, resume=resume, ranks=ranks)
        if is_supervised_here(run, os.environ):
            code = supervise_domain(domain, from_step=from_step, from_run=from_run)
            return Answer(summary_of(domain.run_dir), code)
        if resumes_run(domain.run_dir, os.environ):
            resume, from_run = True, None
            from_step = find_open_return(domain.run_dir, from_step, os.environ)
    with _card_of_failure(run_dir or default_directory(run)):
        if cutter is not None:
            summary = cutter.train_sessions(resume=resume, from_step=from_step, from_run=from_run)
        else:
            summary = train_run(
                run,
                run_dir,
                resume=resume,
                from_step=from_step,
                from_run=from_run,
                ranks=ranks,
                open_workers=worker_opener(run),
            )
    print_summary(summary)
    page = write_report(Path(summary["run_dir"]))
    typer.echo(f"report: {page}")
    _leave_card(Path(summary["run_dir"]), summary)
    shown = drill_result(summary)
    if shown is not None:
        typer.echo(shown)
    return Answer({**summary, "report": page}, EXIT_CODE_OF[summary["status"]])


def _make_cutter(run: "RunConfig", run_dir: Path) -> "StageCutter":
    from phalanx.cli.planning.recut import StageCutter

    return StageCutter(run, run_dir)


def _check_directory(run: "RunConfig", run_dir: Path | None, *, resume: bool) -> None:
    """Refuse a directory or a port that the owner of stages cannot have, before torch is imported."""
    from phalanx.train import DomainRun, PipelineRun, check_directory, default_directory
    from phalanx.transport.config import check_port

    if not isinstance(run, DomainRun):
        check_directory(default_directory(run) if run_dir is None else run_dir, resume=resume)
        if isinstance(run, PipelineRun) and run.remote_workers:
            check_port(run.pipeline.transport, "pipeline.transport")


@contextlib.contextmanager
def _card_of_failure(run_dir: Path) -> Iterator[None]:
    """Leave a post-mortem card of a run that ends with an error; one that was refused before it began gets none."""
    before = _summary_moment(run_dir)
    try:
        yield
    except BaseException:
        if _summary_moment(run_dir) != before:
            _leave_card(run_dir, summary_of(run_dir))
        raise


def _summary_moment(run_dir: Path) -> int | None:
    try:
        return (run_dir / "summary.json").stat().st_mtime_ns
    except OSError:
        return None


def _leave_card(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write and print the card of a run that failed or was attacked, or remove the one of an earlier session."""
    from phalanx.watch.post_mortem import make_card, needs_card, remove_card, write_card

    if not needs_card(summary):
        remove_card(run_dir)
        return
    try:
        card = make_card(run_dir)
        print_line(card.describe())
        typer.echo(f"post-mortem: {write_card(card, run_dir)[0]}")
    except InputError as exc:
        typer.echo(f"no post-mortem card: {exc}", err=True)


def _check_attack(run: "RunConfig") -> None:
    """Load the attack of a drill, so that one that cannot be is refused before anything is trained."""
    from phalanx.train import StagedRun

    if isinstance(run, StagedRun) and run.attack.kind != "none":
        from phalanx.lab.attacks.table import check_attack, load_attack

        load_attack(run.attack, run.home)
        check_attack(run.attack)
