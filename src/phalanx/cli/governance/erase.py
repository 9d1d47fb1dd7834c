"""``phalanx erase``: take a document out of a run by replaying the run without it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line

if TYPE_CHECKING:
    from phalanx.governance.erasure import Erasure, ErasurePrice

ERASE_EPILOG = (
    "Example: phalanx erase letters/17 --run runs/first\n\n"
    "Example: phalanx erase letter.txt --run runs/first --data-out data/without --out runs/without\n\n"
    "Example: phalanx erase letter.txt --run runs/a --run runs/b --run runs/c"
)


def erase(
    document: Annotated[str, typer.Argument(metavar="DOC", help="A digest, a text file, or a document name.")],
    run_dirs: Annotated[
        list[Path],
        typer.Option("--run", metavar="RUN_DIR", help="Run that was trained on it; each of several, where sharded."),
    ],
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
    Of several runs, trained apart on shards of the data, those alone are replayed whose data has the document; each
    gets a directory of its own name below --data-out and --out.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    for run_dir in run_dirs:
        run_name(run_dir)
    if (data_out is None) != (out is None):
        raise typer.BadParameter("--data-out and --out belong together; give both, or neither for the price alone")
    if len({run_dir.resolve().name for run_dir in run_dirs}) < len(run_dirs):
        raise typer.BadParameter("--run: two runs have directories of one name; rename one")
    from phalanx.governance.erasure import Erasure, open_shards
    from phalanx.train import PastRun

    pasts = [PastRun(run_dir, certificate) for run_dir in run_dirs]
    if len(pasts) == 1:
        return Answer(_erase_from(Erasure(pasts[0], document), data_out, out))
    facts, erasures = {}, open_shards(pasts, document)
    for erasure in erasures:
        name = erasure.past.path.resolve().name
        places = (None if folder is None else folder / name for folder in (data_out, out))
        facts[name] = _erase_from(erasure, *places)
    untouched = [name for run_dir in run_dirs if (name := run_dir.resolve().name) not in facts]
    print_figures({"runs without the document": ", ".join(untouched) or "none"})
    return Answer({"shards": facts, "untouched": untouched})


def _erase_from(erasure: "Erasure", data_out: Path | None, out: Path | None) -> dict[str, Any]:
    price = erasure.estimate_price()
    print_figures({"run": str(erasure.past.path), **_price_rows(price)})
    if data_out is None or out is None:
        return {"price": price.to_json()}
    record = erasure.erase_document(data_out, out)
    print_line(
        f"{data_out}: data set {record['new_dataset']} without the document; its absence is proven in the record"
    )
    if "final_weights_digest" in record:
        print_line(f"{out}: weights {record['final_weights_digest']}, as if the document had never been there")
    return {"price": price.to_json(), "record": record, "data": data_out, "run": out}


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
