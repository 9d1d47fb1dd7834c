"""phalanx site: train in federated rounds on this machine's own texts."""

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
