"""``phalanx data``: all its verbs."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.access_gate import require_approvals
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.data.build import build
from phalanx.cli.data.convert import export, import_
from phalanx.cli.data.copy import copy
from phalanx.cli.data.look import inspect, report
from phalanx.cli.data.options import DatasetDir, KeyFile, open_given
from phalanx.cli.data.sample import sample
from phalanx.cli.data.tokenizer_options import Field, Texts
from phalanx.cli.data.verify import verify
from phalanx.cli.data.where import where


def diff(
    first: DatasetDir,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="The directory of another dataset.")],
    *,
    documents: Annotated[
        int, typer.Option("--documents", metavar="N", min=0, help="Maximum number of differing documents to list.")
    ] = 10,
    key: KeyFile = None,
) -> Answer:
    """Compare two datasets: sources, steps, thresholds, counts, and documents by digest."""
    from phalanx.data.build.look import compare_datasets, named_changes

    datasets = open_given(first, key), open_given(second, key)
    differences = compare_datasets(*datasets)
    named = list(named_changes(*datasets, documents))
    print_rows(differences["changed"])
    print_figures({f"documents {name}": value for name, value in differences["documents"].items()})
    print_rows(named)
    return Answer({**differences, "named": named})


def new_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, readable by you only.")]) -> Answer:
    """Create a random key for encrypted datasets; without the key they cannot be read."""
    from phalanx.data.shards import SealKey

    name = SealKey.create_file(file).name
    typer.echo(f'{file}: key {name}; in the recipe: [output] key = "{file}"')
    return Answer({"file": file, "key": name})


def rotate(
    directory: DatasetDir,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The current key.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The new key.")],
) -> Answer:
    """Wrap a dataset's data key with a new key; shards and signature stay, and older copies open with the old key."""
    from phalanx.data.shards import SealKey, rewrap_data_key
    from phalanx.governance.acts import name_target

    require_approvals("key_rotation", lambda: name_target("key_rotation", directory), directory)
    name = rewrap_data_key(directory, SealKey.from_file(key), SealKey.from_file(to))
    typer.echo(f"{directory}: now opens with key {name} only; put its path into data.dataset.key_file")
    return Answer({"directory": directory, "key": name})


def verbatim_index(
    out: Annotated[Path, typer.Argument(metavar="FILE.npy", help="New file; it holds hashes and no text.")],
    text: Texts = None,
    field: Field = "text",
) -> Answer:
    """Make the index of the filter `verbatim`: runs of about 50 tokens of these texts are found in answers."""
    from phalanx.data.tokenizers.texts import texts_of
    from phalanx.errors import ConfigError
    from phalanx.serve.filters import VerbatimIndex

    if not text:
        raise ConfigError("--text: name the files or directories that the model was trained on")
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another place")
    num_grams = VerbatimIndex.write(out, (content for _, content in texts_of(text, field)))
    typer.echo(f"{out}: {num_grams:,} hashes")
    return Answer({"file": out, "hashes": num_grams})


def classifier(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="New file with the weights; it holds no text.")],
    positive: Annotated[
        list[Path],
        typer.Option("--positive", metavar="PATH", help="Texts that are to score 1: the good, or harmful ones."),
    ],
    negative: Annotated[list[Path], typer.Option("--negative", metavar="PATH", help="Texts that are to score 0.")],
    field: Field = "text",
) -> Answer:
    """Train the classifier of the rules `quality` and `harm`, and print its errors on a fifth that it has not seen."""
    from phalanx.data.rules.text_classifier import train_classifier
    from phalanx.data.tokenizers.texts import texts_of
    from phalanx.errors import ConfigError

    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another place")
    groups = [(content for _, content in texts_of(paths, field)) for paths in (positive, negative)]
    trained, measure = train_classifier(*groups)
    trained.write_file(out)
    low, high = measure.area_interval
    print_figures(
        {
            "held out": f"{measure.num_positive} positive, {measure.num_negative} negative texts",
            "area under the curve": f"{measure.area:.4f} ({low:.4f} to {high:.4f})",
        }
    )
    print_rows(
        [
            {
                "score from": rate.threshold,
                "positive below": _show_share(rate.missed, rate.missed_interval),
                "negative at or above": _show_share(rate.false_alarms, rate.false_alarms_interval),
            }
            for rate in measure.rates
        ]
    )
    return Answer({"file": out, **trained.facts})


def _show_share(share: float, interval: tuple[float, float]) -> str:
    return f"{share:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"


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
    epilog="Example: phalanx data classifier quality.safetensors --positive texts/good --negative texts/raw"
)(classifier)
data_app.command(
    "import",
    epilog="Example: phalanx data import datasets/mine web.train.parquet --tokenizer tokenizer.json --eos-id 0\n\n"
    "Example: phalanx data import datasets/mine web.train.idx --tokenizer tokenizer.json --eos-id 0",
)(import_)
