"""``phalanx classify``: the classes of texts."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer, for_programs
from phalanx.cli.options import BestStep, Device, ModelStep, OwnCode, OwnerCertificate

if TYPE_CHECKING:
    from phalanx.serve import ClassifierModel

CLASSIFY_EPILOG = (
    'Example: phalanx classify runs/first --text "fracture of the left wrist"\n\n'
    "Example: phalanx classify runs/first --input notes.jsonl --out classes.jsonl"
)


def classify(
    where: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run that learned to classify, or its exported whole model.")
    ],
    *,
    text: Annotated[str | None, typer.Option("--text", help="Text to classify; default: each line of stdin.")] = None,
    lines: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.jsonl", help="File of texts; each line has a text.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Output file: the lines with their classes.")
    ] = None,
    step: ModelStep = None,
    best: BestStep = False,
    certificate: OwnerCertificate = None,
    own_code: OwnCode = False,
    device: Device = "cpu",
) -> Answer:
    """Classify texts with a model that a federated or split run trained; a run's checkpoint is verified."""
    from phalanx.config import escape_controls
    from phalanx.errors import ConfigError
    from phalanx.serve.place import check_place

    # a mistake is said before torch is imported
    check_place(where)
    if (lines is None) != (out is None):
        raise ConfigError("--input and --out belong together; give both or neither")
    if text is not None and lines is not None:
        raise ConfigError("--text and --input exclude each other; choose one")
    from phalanx.serve import open_classifier

    model = open_classifier(where, step=step, best=best, certificate=certificate, own_code=own_code, device=device)
    if lines is not None and out is not None:
        return _classify_file(model, lines, out)
    texts = [text] if text is not None else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    results = model.classify_texts(texts)
    if not for_programs():
        for result in results:
            cut = ", cut off" if result.is_cut else ""
            typer.echo(f"{escape_controls(result.label)} ({result.probability:.2f}{cut})")
    rows = [{"text": given, **result.model_dump()} for given, result in zip(texts, results, strict=True)]
    return Answer({"classes": model.classes, "texts": rows})


def _classify_file(model: "ClassifierModel", lines: Path, out: Path) -> Answer:
    from phalanx.serve import classify_file
    from phalanx.telemetry import row_bar

    with row_bar("texts") as print_progress:
        done, num_cut = classify_file(model, lines, out, print_progress)
    if not for_programs():
        cut = f", {num_cut} of them longer than the model reads and cut off" if num_cut else ""
        typer.echo(f"{out}: {done} texts{cut}")
    return Answer({"file": out, "classified": done, "cut": num_cut})
