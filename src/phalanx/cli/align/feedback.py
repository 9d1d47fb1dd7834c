"""``phalanx align feedback``: outcomes of safety and red-team prompts as training data."""

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.cli.files import write_text

Outcomes = Annotated[Path, typer.Argument(metavar="OUTCOMES.jsonl", help="Output of `phalanx align safety --out`.")]
As = Annotated[
    str, typer.Option("--as", metavar="pairs|conversations", help="Rows for preferences, or for fine-tuning.")
]
Refusal = Annotated[str, typer.Option("--answer", help='Answer to learn where a line has no "better".')]
Out = Annotated[Path, typer.Option("--out", metavar="FILE.jsonl", help="Output file.")]


def feedback(
    outcomes: Outcomes, *, out: Out, shape: As = "pairs", answer: Refusal = "I'm sorry, I can't help with that."
) -> Answer:
    """Turn prompts that a model failed at into rows to train on: the better answer, before the one it gave."""
    from typing import cast

    from phalanx.align import feedback_rows, read_outcomes
    from phalanx.align.outcomes import Shape
    from phalanx.errors import DataError

    if shape not in ("pairs", "conversations"):
        raise typer.BadParameter(f"--as {shape}: expected pairs or conversations")
    rows, counts = feedback_rows(read_outcomes(outcomes), cast(Shape, shape), answer)
    if not rows:
        raise DataError(f"{outcomes}: has no outcome to learn from: {json.dumps(counts)}")
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    facts = {"file": out, "rows": len(rows), **counts}
    print_figures(facts)
    return Answer(facts)
