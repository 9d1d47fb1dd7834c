"""``phalanx data sample``: documents of a dataset, or rows of a run with their learned tokens."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_warnings
from phalanx.cli.data.options import KeyFile, Signer, open_given

if TYPE_CHECKING:
    from phalanx.data.row_text import RowPiece

_SHOWN = 400
_BEGINS, _ENDS = "⟦", "⟧"


def sample(
    place: Annotated[Path, typer.Argument(metavar="DIR|RUN.toml", help="Directory of a dataset, or a run file.")],
    *,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, max=1000, help="Number of samples to print.")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the sample.")] = 0,
    mask: Annotated[bool, typer.Option("--mask", help="Run file only: mark the learned tokens, ⟦so⟧.")] = False,
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only this mixture group.")] = None,
    key: KeyFile = None,
    signer: Signer = None,
) -> Answer:
    """Print random documents of a dataset, or rows of a run; --mask marks the learned tokens."""
    if place.suffix == ".toml":
        return _sample_rows(place, count, seed, mask=mask)
    if mask:
        raise typer.BadParameter("--mask needs the rows of a run; give a run file, RUN.toml")
    from phalanx.data.build.look import sampled_documents

    documents = list(sampled_documents(open_given(place, key, signer), count, seed, group))
    for document in documents:
        text = document["text"]
        print_figures({**document, "text": text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."})
        typer.echo()
    return Answer({"documents": documents})


def _sample_rows(run_file: Path, count: int, seed: int, *, mask: bool) -> Answer:
    import random

    from phalanx.train import default_directory, load_run, text_warnings
    from phalanx.train.batches.shown_rows import shown_rows
    from phalanx.train.records.run_directory import cache_beside

    run = load_run(run_file)
    print_warnings(text_warnings(run))
    rows = shown_rows(run, cache_beside(default_directory(run)))
    # not secret: another seed shows other rows
    numbers = sorted(random.Random(seed).sample(range(rows.count), min(count, rows.count)))  # noqa: S311
    rows_shown: list[dict[str, Any]] = []
    for number in numbers:
        for row_facts, pieces in rows.show(number):
            learned = sum(piece.tokens for piece in pieces if piece.learned)
            tokens = sum(piece.tokens for piece in pieces)
            shown = {"row": number, **row_facts, "tokens": tokens, "learned": learned}
            rows_shown.append({**shown, "pieces": [asdict(piece) for piece in pieces]})
            print_figures(shown)
            _print_pieces(pieces, mask=mask)
    return Answer({"rows": rows_shown})


def _print_pieces(pieces: "list[RowPiece]", *, mask: bool) -> None:
    """Print a row, its documents apart; learned tokens in marks, and in colour on a terminal."""
    from phalanx.cli.answers.answer import for_programs
    from phalanx.config import escape_controls

    if for_programs():
        return
    document = pieces[0].document
    for piece in pieces:
        if piece.document != document:
            typer.echo("\n" + "-" * 8)
            document = piece.document
        text = escape_controls(piece.text)
        marked = mask and piece.learned
        typer.echo(typer.style(f"{_BEGINS}{text}{_ENDS}", fg="green", bold=True) if marked else text, nl=False)
    typer.echo("\n")
