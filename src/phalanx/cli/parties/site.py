"""phalanx site: train in federated rounds on this machine's own texts; nvflare-job: what carries them."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer


def site(
    site_file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="Keys, texts and socket of this site.")],
) -> Answer:
    """Be one site of federated rounds: load the model once, and train whenever the owner asks.

    Texts and keys stay here. Frames come from the client of an engine, such as NVFlare, at a local socket; only those
    that the owner has signed count. It stays over any number of sessions, and ends when the owner ends the run.
    """
    from phalanx.train.sessions.site_file import read_site

    # a mistake is said before the model is loaded
    file, run, identity = read_site(site_file)
    from phalanx.train.parties.site_process import run_site

    run_site(file, run, identity, typer.echo)
    return Answer({"status": "complete", "party": identity.name})


def nvflare_job(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help='A run with federated.carrier = "bridge".')],
    job: Annotated[Path, typer.Argument(metavar="DIR", help="New directory of the job.")],
    run_dir: Annotated[Path | None, typer.Option(help="Of `phalanx train`; left out, runs/NAME.")] = None,
    site_socket: Annotated[
        str, typer.Option(help="Where sites listen; {site} stands for the name, ~ for the home directory.")
    ] = "~/.phalanx/{site}/site.sock",
) -> Answer:
    """Write the NVFlare job that carries a run's frames, for `nvflare job submit`; its clients are named as sites are.

    NVFlare's server runs on the owner's machine, as the owner's user; it gets signed frames and none of our keys.
    """
    from phalanx.errors import ConfigError
    from phalanx.federated.carriers.nvflare_job import write_job
    from phalanx.train import default_directory, load_run
    from phalanx.train.sessions.site_carriers import OWNER_SOCKET

    run = load_run(run_file)
    if run.federated is None or run.federated.carrier != "bridge":
        raise ConfigError(f'{run_file}: has no sites that an engine carries for; set federated.carrier = "bridge"')
    owner = (run_dir or default_directory(run)).resolve() / OWNER_SOCKET
    write_job(job, run.name, run.federated.sites, owner, site_socket)
    typer.echo(f"{job}: a job for {', '.join(run.federated.sites)}; start `phalanx train {run_file}`, then submit it")
    return Answer({"job": job, "owner_socket": owner, "site_socket": site_socket})
