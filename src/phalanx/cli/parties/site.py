"""phalanx site: train in federated rounds on this machine's own texts; nvflare-job, flower-app: what carries them."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line

if TYPE_CHECKING:
    from phalanx.train.config import FederatedRun

BridgedRun = Annotated[Path, typer.Argument(metavar="RUN.toml", help='A run with federated.carrier = "bridge".')]
RunDir = Annotated[Path | None, typer.Option(help="Run directory of `phalanx train`; default: runs/NAME.")]
SiteSocket = Annotated[
    str, typer.Option(help="Socket path of the sites; {site} is replaced by the name, ~ by the home directory.")
]
_SITE_SOCKET = "~/.phalanx/{site}/site.sock"


def site(
    site_file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="Site file: keys, texts and socket.")],
) -> Answer:
    """Serve as a site of federated rounds: load the model once, and train on request of the owner.

    Texts and keys stay here. Frames come from the client of an engine, NVFlare or Flower, at a local socket; only
    frames signed by the owner are accepted. It serves any number of sessions, and ends when the owner ends the run.
    """
    from phalanx.train.sessions.site_file import read_site

    # a mistake is said before the model is loaded
    file, run, identity = read_site(site_file)
    from phalanx.train.parties.site_process import run_site

    run_site(file, run, identity, print_line)
    return Answer({"status": "complete", "party": identity.name})


def nvflare_job(
    run_file: BridgedRun,
    job: Annotated[Path, typer.Argument(metavar="DIR", help="New directory for the job.")],
    run_dir: RunDir = None,
    site_socket: SiteSocket = _SITE_SOCKET,
) -> Answer:
    """Write the NVFlare job that carries a run's frames, for `nvflare job submit`; clients have the names of the sites.

    NVFlare's server runs on the owner's machine, as the owner's user; it gets signed frames and none of our keys.
    """
    from phalanx.federated.carriers.engine_jobs import write_nvflare_job

    run, sites, owner = _open_bridged(run_file, run_dir)
    write_nvflare_job(job, run.name, sites, owner, site_socket)
    typer.echo(f"{job}: a job for {', '.join(sites)}; start `phalanx train {_quote_path(run_file)}`, then submit it")
    return Answer({"job": job, "owner_socket": owner, "site_socket": site_socket})


def flower_app(
    run_file: BridgedRun,
    app: Annotated[Path, typer.Argument(metavar="DIR", help="New directory for the app.")],
    run_dir: RunDir = None,
    site_socket: SiteSocket = _SITE_SOCKET,
) -> Answer:
    """Write the Flower app that carries a run's frames, for `flwr run`; each SuperNode names its site.

    Flower's SuperLink runs on the owner's machine, as the owner's user; it gets signed frames and none of our keys.
    A SuperNode is started with --node-config 'site="NAME"'.
    """
    from phalanx.federated.carriers.engine_jobs import write_flower_app

    _, sites, owner = _open_bridged(run_file, run_dir)
    write_flower_app(app, owner, site_socket)
    commands = f"start `phalanx train {_quote_path(run_file)}`, then `flwr run {_quote_path(app)}`"
    typer.echo(f"{app}: an app for {', '.join(sites)}; {commands}")
    return Answer({"app": app, "owner_socket": owner, "site_socket": site_socket})


def _quote_path(path: Path) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))


def _open_bridged(run_file: Path, run_dir: Path | None) -> "tuple[FederatedRun, tuple[str, ...], Path]":
    """Return a run that an engine carries for, its sites, and where its owner listens."""
    from phalanx.errors import ConfigError
    from phalanx.train import FederatedRun, default_directory, load_run
    from phalanx.train.sessions.site_carriers import OWNER_SOCKET

    run = load_run(run_file)
    if not isinstance(run, FederatedRun) or run.federated.carrier != "bridge":
        raise ConfigError(f'{run_file}: needs sites behind an engine; set federated.carrier = "bridge"')
    return run, run.federated.sites, (run_dir or default_directory(run)).resolve() / OWNER_SOCKET
