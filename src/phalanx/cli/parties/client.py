"""phalanx client: train with others from texts that never leave this machine."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line


def client(
    client_file: Annotated[Path, typer.Argument(metavar="CLIENT.toml", help="Client file: keys, texts and policy.")],
) -> Answer:
    """Join a split as a client: appraise the enclave, and send it sealed training data.

    Texts and keys stay here; the owner of the run gets sums over all clients. After a broken session the client waits;
    it ends when the owner ends the run.
    """
    from phalanx.train.parties.client_file import read_client

    # a mistake is said before torch is imported
    config, run, name = read_client(client_file)
    from phalanx.train.parties.client_process import run_client

    run_client(config, run, name, print_line)
    return Answer({"status": "complete", "party": name})
