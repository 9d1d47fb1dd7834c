"""``phalanx interpret``: a model's view of a text, at each token, at each layer, and beside its training documents."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_page, print_rows

if TYPE_CHECKING:
    from phalanx.data.shards import Dataset
    from phalanx.serve import TextModel

interpret_app = typer.Typer(no_args_is_help=True, help="Show what a model makes of a text.")
Where = Annotated[Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run, a checkpoint of a run, or a model.")]
GivenText = Annotated[str | None, typer.Option("--text", help="The text; default: stdin.")]
Step = Annotated[int | None, typer.Option("--step", metavar="STEP", help="Step of the run's checkpoint.")]
Out = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Output file of a page.")]


@interpret_app.command(epilog='Example: phalanx interpret loss runs/first --text "The owner holds" --html loss.html')
def loss(where: Where, text: GivenText = None, step: Step = None, html: Out = None) -> Answer:
    """Show a text with the loss of each token: the redder, the less the model expected it."""
    model, passage = _open(where, step), _read(text)
    from phalanx.interpret.page import colour_losses, write_losses
    from phalanx.interpret.tokens import token_losses

    rows = token_losses(model, passage)
    print_page(colour_losses(rows))
    losses = [row.loss for row in rows if row.loss is not None]
    facts = {"tokens": [row.to_json() for row in rows], "mean_loss": sum(losses) / len(losses)}
    return Answer({**facts, **({} if html is None else {"page": write_losses(rows, str(where), html)})})


@interpret_app.command(epilog='Example: phalanx interpret layers runs/first --text "The owner holds the"')
def layers(
    where: Where,
    text: GivenText = None,
    step: Step = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=50, help="Guesses of each layer.")] = 5,
    html: Out = None,
) -> Answer:
    """Show the next token that each layer would guess (logit lens), and the attention of the last one."""
    model, prompt = _open(where, step), _read(text)
    from phalanx.interpret.page import list_guesses, write_layers
    from phalanx.interpret.tokens import encode_text, layer_guesses, token_text

    guesses = layer_guesses(model, prompt, tokens)
    print_rows(list_guesses(guesses))
    pieces = [token_text(model, token) for token in encode_text(model, prompt, min_tokens=1)]
    facts = {"prompt": pieces, "layers": [guess.to_json() for guess in guesses]}
    return Answer({**facts, **({} if html is None else {"page": write_layers(pieces, guesses, str(where), html)})})


@interpret_app.command(
    epilog='Example: phalanx interpret documents runs/first --text "The owner holds the first stage"\n\n'
    'Example: phalanx interpret documents models/best --dataset data/notes --text "The patient"'
)
def documents(
    where: Where,
    text: GivenText = None,
    step: Step = None,
    *,
    dataset: Annotated[
        Path | None, typer.Option("--dataset", metavar="DIR", help="Dataset; default: that of the run.")
    ] = None,
    signer: Annotated[
        str | None, typer.Option("--signer", metavar="FINGERPRINT", help="Expected fingerprint of its signing key.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Key file of an encrypted dataset.")] = None,
    shown: Annotated[int, typer.Option("--shown", min=1, max=100, help="Documents to show.")] = 5,
    candidates: Annotated[
        int,
        typer.Option(
            "--candidates", min=1, max=1000, help="Nearest documents by hidden states to compare by gradient."
        ),
    ] = 50,
    html: Out = None,
) -> Answer:
    """Show the training documents nearest to a text, by hidden states and by gradient, with source and licence.

    Similarities are no proof that a document taught the text. `phalanx data where` says in which steps a run saw one.
    """
    model, passage = _open(where, step), _read(text)
    from phalanx.interpret.documents import find_nearest
    from phalanx.interpret.page import write_documents

    opened = _open_documents(where, dataset, signer, key)
    near = find_nearest(model, passage, opened, num_shown=shown, num_candidates=candidates)
    columns = ("gradient", "similarity", "name", "source", "licence", "beginning")
    print_rows([{name: row.to_json()[name] for name in columns} for row in near])
    typer.echo(f"dataset: {opened.trust_statement}")
    facts = {"documents": [row.to_json() for row in near], "dataset": opened.digest, "signer": opened.signer}
    return Answer({**facts, **({} if html is None else {"page": write_documents(near, str(where), html)})})


def _open(where: Path, step: int | None) -> "TextModel":
    from phalanx.serve.place import check_place

    # a mistake is said before torch is imported
    check_place(where)
    from phalanx.serve import open_text_model

    return open_text_model(where, step=step)


def _read(text: str | None) -> str:
    return sys.stdin.read() if text is None else text


def _open_documents(where: Path, dataset: Path | None, signer: str | None, key: Path | None) -> "Dataset":
    from phalanx.data.shards import SealKey, open_dataset
    from phalanx.errors import ConfigError
    from phalanx.serve.place import checkpoint_place, is_run

    if dataset is None:
        run_dir, _ = checkpoint_place(where) or (where, None)
        if not is_run(run_dir):
            raise ConfigError(f"{where}: is no run, whose dataset would be known; give --dataset")
        from phalanx.train import PastRun
        from phalanx.train.records.lineage import dataset_of

        dataset, named = dataset_of(PastRun(run_dir))
        signer, key = signer or named.signer, key or named.key_file
    return open_dataset(dataset, signer, None if key is None else SealKey.from_file(key))
