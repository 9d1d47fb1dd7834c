"""``phalanx data``: all commands about datasets of token shards."""

import typer

from phalanx.cli.data.verify import verify
from phalanx.cli.data.where import where

data_app = typer.Typer(no_args_is_help=True, help="Build datasets of token shards, look at them, check them.")

data_app.command(
    epilog="Example: phalanx data verify datasets/notes --signer FINGERPRINT\n\n"
    "Example: phalanx data verify --proof notes-0007.proof.json --signer FINGERPRINT"
)(verify)
data_app.command(
    epilog="Example: phalanx data where letters/0007.txt --run runs/first\n\n"
    "Example: phalanx data where notes/0007 --dataset datasets/notes --proof 0007.proof.json"
)(where)
