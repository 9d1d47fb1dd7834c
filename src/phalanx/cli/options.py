"""Options that several verbs share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override one key of the file; may be repeated."),
]
Unsets = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="A.B", help="Remove one key or section of the file; may be repeated."),
]

ModelStep = Annotated[
    int | None, typer.Option("--step", metavar="STEP", help="Step of the run's checkpoint; default: the newest.")
]
BestStep = Annotated[bool, typer.Option("--best", help="Take the run's checkpoint with the best validation.")]
OwnerCertificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
]
OwnCode = Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code; read it first.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Output directory; default: runs/NAME.")]


def overrides_of(sets: Sequence[str] | None, unsets: Sequence[str] | None) -> list[str]:
    """Return the overrides of a run file: first the keys to remove, then the keys to set."""
    return [*(f"{key}-" for key in unsets or ()), *(sets or ())]


PLAN_EXAMPLES = (
    "Example: phalanx plan run.toml --html plan.html --out parallel.toml\n\n"
    "Example: phalanx plan --model llama-2-70b --cluster llama2-rsc --gpus 512 --tokens 2e12 --sequence-length 4096\n\n"
    "Example: phalanx plan --model smollm2-135m --split --parties parties.toml --sequences 32 --sequence-length 256"
)
