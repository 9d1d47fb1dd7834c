"""``phalanx watch``: a live page of training runs, metrics, traces and alerts, and the card of a run that failed."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer, for_programs, print_object
from phalanx.cli.console import print_line

if TYPE_CHECKING:
    from phalanx.watch.server import WatchAddresses

WATCH_EPILOG = (
    "Example: phalanx watch runs/first\n\n"
    "Example: phalanx watch runs/first runs/second --prometheus 9109 --config watch.toml\n\n"
    "Example: phalanx watch runs/first --once --json\n\n"
    "Example: phalanx watch runs/first --card\n\n"
    "The page is on this machine alone; from another one: ssh -L 8090:127.0.0.1:8090 HOST, with --port 8090."
)


def watch(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Run directories, running or not.")],
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page on loopback; 0: any free one.")] = 0,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page: metrics and alerts alone.")] = False,
    prometheus: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Serve /metrics for Prometheus on this loopback port."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE.toml", help="Traces, rules and receivers of alerts.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state and the alerts that hold, and end: 7 if there are any.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Print the post-mortem card of a run that has ended, and write it there.")
    ] = False,
) -> Answer:
    """Watch training runs: a live page, metrics, traces and alerts, from the files of their directories alone."""
    if card:
        return _print_cards(run_dirs)
    from phalanx.cli.serving.options import require_server

    require_server()
    from phalanx.watch import RunWatchConfig, WatchPlan, load_run_watch, look_once, watch_runs

    settings = RunWatchConfig() if config is None else load_run_watch(config)
    if once:
        state = look_once(run_dirs, settings)
        alerts = [alert for run in state["runs"] for alert in run["alerts"]]
        for run in state["runs"]:
            step = -1 if run["last"]["step"] is None else run["last"]["step"]
            print_line(f"{run['name']}: {run['status']}, {step + 1} of {run['steps']} steps")
        for alert in alerts:
            print_line(f"{alert['run']}: {alert['text']}")
        return Answer(state, 7 if alerts else 0)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    # where a processor is short, the run has it
    os.nice(10)
    watch_runs(WatchPlan(tuple(run_dirs), None if no_page else port, prometheus, settings), _announce)
    return Answer({"event": "stopped"})


def _announce(addresses: "WatchAddresses") -> None:
    print_object({"event": "ready", "url": addresses.url, "link": addresses.link, "metrics_url": addresses.metrics_url})
    if for_programs():
        return
    if addresses.link is not None:
        typer.echo(f"page (opens once, within ten minutes): {addresses.link}")
    if addresses.metrics_url is not None:
        typer.echo(f"metrics: {addresses.metrics_url}")
    typer.echo("Ctrl-C ends watching; the runs go on")


def _print_cards(run_dirs: list[Path]) -> Answer:
    from phalanx.watch import make_card, write_card

    cards = {}
    for run_dir in run_dirs:
        post_mortem = make_card(run_dir)
        print_line(post_mortem.describe())
        cards[str(run_dir)] = {
            **post_mortem.to_json(),
            "files": [str(path) for path in write_card(post_mortem, run_dir)],
        }
    return Answer({"cards": cards})
