"""``phalanx data verbatim-index``: an index by which a server recognises its training text."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.data.tokenizer_options import Field, Texts


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
