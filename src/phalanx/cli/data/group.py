"""``phalanx data``: all its verbs."""

import typer

from phalanx.cli.data.build import build
from phalanx.cli.data.convert import export, import_
from phalanx.cli.data.copy import copy
from phalanx.cli.data.diff import diff
from phalanx.cli.data.keys import new_key, rotate
from phalanx.cli.data.look import inspect, report
from phalanx.cli.data.sample import sample
from phalanx.cli.data.verbatim import verbatim_index
from phalanx.cli.data.verify import verify
from phalanx.cli.data.where import where

data_app = typer.Typer(
    no_args_is_help=True,
    help="Build a dataset of signed token shards from raw texts; inspect, check, compare and copy datasets.",
)
data_app.command(
    epilog="Example: phalanx data build examples/data_folder.toml --dry-run\n\n"
    "Example: phalanx data build recipe.toml --out datasets/mine --workers 8\n\n"
    "Example: phalanx data build recipe.toml --out s3://bucket/mine\n\n"
    "Example: phalanx data build recipe.toml --engine ray --address auto"
)(build)
data_app.command(
    epilog="Example: phalanx data inspect datasets/mine\n\n"
    'Example: phalanx data inspect datasets/mine --document "notes/old.txt"\n\n'
    "Example: phalanx data inspect datasets/mine --quarantine --json"
)(inspect)
data_app.command(
    epilog="Example: phalanx data verify datasets/notes --signer FINGERPRINT\n\n"
    "Example: phalanx data verify --proof notes-0007.proof.json --signer FINGERPRINT"
)(verify)
data_app.command(
    epilog="Example: phalanx data where letters/0007.txt --run runs/first\n\n"
    "Example: phalanx data where notes/0007 --dataset datasets/notes --proof 0007.proof.json"
)(where)
data_app.command(
    epilog="Example: phalanx data sample datasets/mine --count 3 --seed 7\n\n"
    "Example: phalanx data sample examples/sft.toml --mask"
)(sample)
data_app.command(epilog="Example: phalanx data diff datasets/first datasets/second --documents 20")(diff)
data_app.command(
    epilog="Example: phalanx data copy datasets/mine s3://bucket/mine\n\n"
    "Example: phalanx data copy s3://bucket/mine datasets/mine --signer FINGERPRINT"
)(copy)
data_app.command(epilog="Example: phalanx data report datasets/mine")(report)
data_app.command(epilog="Example: phalanx data export datasets/mine parquet --to parquet")(export)
data_app.command(epilog="Example: phalanx data new-key secrets/data.key")(new_key)
data_app.command(epilog="Example: phalanx data rotate datasets/mine --key secrets/data.key --to secrets/next.key")(
    rotate
)
data_app.command(epilog="Example: phalanx data verbatim-index indexes/trained.npy --text my_texts")(verbatim_index)
data_app.command(
    "import",
    epilog="Example: phalanx data import datasets/mine web.train.parquet --tokenizer tokenizer.json --eos-id 0\n\n"
    "Example: phalanx data import datasets/mine web.train.idx --tokenizer tokenizer.json --eos-id 0",
)(import_)
