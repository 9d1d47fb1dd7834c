"""``phalanx erase``: take a document out of a run by replaying the run without it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line

if TYPE_CHECKING:
    from phalanx.governance.erasure import ErasurePrice

ERASE_EPILOG = (
    "Example: phalanx erase letters/17 --run runs/first\n\n"
    "Example: phalanx erase letter.txt --run runs/first --data-out data/without --out runs/without"
)


def erase(
    document: Annotated[str, typer.Argument(metavar="DOC", help="A digest, a text file, or a document name.")],
    run_dir: Annotated[Path, typer.Option("--run", metavar="RUN_DIR", help="Run that was trained on it.")],
    *,
    data_out: Annotated[
        Path | None, typer.Option("--data-out", metavar="DIR", help="New directory of the data without it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="New directory of the replayed run.")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
) -> Answer:
    """Print what an exact erasure costs; with --data-out and --out, replay the run without the document.

    The replay begins at the last checkpoint before the document was first seen. Its weights are those of a run that
    never had the document, bit for bit. The old run, its checkpoints and exports, and the old data still hold it.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    if (data_out is None) != (out is None):
        raise typer.BadParameter("--data-out and --out belong together; give both, or neither for the price alone")
    from phalanx.governance.erasure import Erasure
    from phalanx.train import PastRun

    erasure = Erasure(PastRun(run_dir, certificate), document)
    price = erasure.estimate_price()
    print_figures(_price_rows(price))
    if data_out is None or out is None:
        return Answer({"price": price.to_json()})
    record = erasure.erase_document(data_out, out)
    print_line(
        f"{data_out}: data set {record['new_dataset']} without the document; its absence is proven in the record"
    )
    if "final_weights_digest" in record:
        print_line(f"{out}: weights {record['final_weights_digest']}, as if the document had never been there")
    return Answer({"price": price.to_json(), "record": record, "data": data_out, "run": out})


def _price_rows(price: "ErasurePrice") -> dict[str, Any]:
    begin = f"the checkpoint of step {price.from_step}" if price.from_step else "the beginning: no checkpoint is older"
    rows: dict[str, Any] = {"document": price.document, "places in the data": price.places}
    if price.first_step is None:
        rows |= {"seen": "in no step: only the data set is written anew"}
    else:
        rows |= {
            "seen": f"in {price.num_seen} steps, first in step {price.first_step}",
            "replay from": begin,
            "steps to replay": price.steps,
            "tokens to replay": price.tokens,
            "about": None if price.seconds is None else f"{price.seconds} s, as the run took for as many steps",
        }
    return {**rows, **{f"  remark {n}": remark for n, remark in enumerate(price.remarks, 1)}}
