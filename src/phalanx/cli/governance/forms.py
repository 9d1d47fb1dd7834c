"""``phalanx forms``: documents about a run, filled from its facts."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line

FORMS_EPILOG = (
    "Example: phalanx forms runs/first --out forms\n\n"
    "Example: phalanx forms runs/first --out forms --form model_card --form risk_register"
)


def forms(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the forms; none is written over.")],
    *,
    form: Annotated[
        list[str] | None, typer.Option("--form", metavar="NAME", help="Only this form; may be repeated.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--evaluation", metavar="FILE.json", help="Result of eval; default: RUN_DIR/evaluation*.json."),
    ] = None,
    redteam: Annotated[
        Path | None,
        typer.Option("--redteam", metavar="FILE.json", help="Report of redteam; default: RUN_DIR/redteam."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
) -> Answer:
    """Write model card, data sheet, the EU's two forms, NIST AI RMF, risk register and training plan of a run.

    Each field names the file and key of the run that it is from, or is a blank that a person answers; Markdown, JSON.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    from phalanx.governance.forms import load_template, read_documents, write_forms
    from phalanx.train import PastRun

    for name in form or ():
        load_template(name)
    filled = write_forms(read_documents(PastRun(run_dir, certificate), evaluation or (), redteam), out, form or ())
    rows = [
        {
            "form": row.name,
            "from_the_run": sum(value.source is not None for value in row.values),
            "blanks": sum(value.source is None for value in row.values),
        }
        for row in filled
    ]
    for row in rows:
        print_line(f"{out / str(row['form'])}.md: {row['from_the_run']} fields from the run, {row['blanks']} blanks")
    return Answer({"directory": out, "forms": rows})
