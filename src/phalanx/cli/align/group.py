"""``phalanx align``: all its verbs."""

import typer

from phalanx.cli.align.choose import choose
from phalanx.cli.align.feedback import feedback
from phalanx.cli.align.revise import revise
from phalanx.cli.align.safety import safety
from phalanx.cli.align.values import values

align_app = typer.Typer(
    no_args_is_help=True,
    help="Make training data of a model's own answers by written principles; measure refusals; compare values.",
)
align_app.command(
    epilog="Example: phalanx align revise runs/base --principles principles.toml --prompts prompts.jsonl "
    "--out revised.jsonl"
)(revise)
align_app.command(
    epilog="Example: phalanx align choose runs/sft --principles principles.toml --prompts prompts.jsonl "
    "--out pairs.jsonl\n\n"
    "Example: phalanx align choose runs/sft --principles principles.toml --principle honest --judge judge.toml "
    "--prompts prompts.jsonl --out honest.jsonl\n\n"
    "Example: phalanx align choose runs/sft --demonstrations --prompts shown.jsonl --out pairs.jsonl"
)(choose)
align_app.command(
    epilog="Example: phalanx align safety runs/sft --json\n\n"
    'Example: phalanx align safety models/mine --set mine.jsonl --violation "[0-9]" --out outcomes.jsonl\n\n'
    "Example: phalanx align safety runs/sft --hook attacks.py:attack --out outcomes.jsonl"
)(safety)
align_app.command(epilog="Example: phalanx align feedback outcomes.jsonl --as pairs --out pairs.jsonl")(feedback)
align_app.command(epilog="Example: phalanx align values run.toml pairs.jsonl --show 5")(values)
