"""Options that the commands about vocabularies share."""

from pathlib import Path
from typing import Annotated

import typer

Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="PATH", help="*.txt, *.md or *.jsonl, file or directory; may be repeated."),
]
Field = Annotated[str, typer.Option("--field", metavar="NAME", help="Field of a JSON line with its text.")]
