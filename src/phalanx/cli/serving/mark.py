"""``phalanx mark``: the keys of marked text."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.access_gate import require_approvals
from phalanx.cli.answers.answer import Answer

mark_app = typer.Typer(no_args_is_help=True, help="Make the keys by which a server marks its texts.")


@mark_app.command(epilog="Example: phalanx mark new-keys keys/marks.json")
def new_keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, readable by you only.")]) -> Answer:
    """Draw the first key into a new file; who has the file can find the mark, and forge it."""
    from phalanx.serve.marks import MarkKeyRing

    ring = MarkKeyRing.create(file)
    typer.echo(f"{file}: epoch {ring.newest.epoch}")
    return Answer({"file": file, "epoch": ring.newest.epoch})


@mark_app.command(epilog="Example: phalanx mark new-epoch keys/marks.json")
def new_epoch(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of mark keys.")]) -> Answer:
    """Draw a further key; new text is marked by it, and text of earlier epochs is still found."""
    from phalanx.governance.acts import name_target
    from phalanx.serve.marks import MarkKeyRing

    require_approvals("key_rotation", lambda: name_target("key_rotation", file), file)
    ring = MarkKeyRing.add_epoch(file)
    typer.echo(f"{file}: epoch {ring.newest.epoch}")
    return Answer({"file": file, "epoch": ring.newest.epoch})
