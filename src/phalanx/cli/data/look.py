"""``phalanx data inspect`` and ``report``: the contents of a dataset, and the fate of a document."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.data.options import DatasetDir, KeyFile, Signer, open_given

_LEFT_OUT = ("dropped", "quarantined", "broken")
_GROUP = ("group", "split", "documents", "tokens")


def inspect(
    directory: DatasetDir,
    *,
    document: Annotated[
        str | None, typer.Option("--document", metavar="NAME", help="Report the fate of documents with this name.")
    ] = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="List the quarantined documents.")] = False,
    key: KeyFile = None,
    signer: Signer = None,
) -> Answer:
    """Print the sources and counts of a dataset, the fate of a document, or the quarantine."""
    from phalanx.data.build.look import account_entries, find_document, signed_report
    from phalanx.errors import InputError

    dataset = open_given(directory, key, signer)
    if document is not None:
        entries = find_document(dataset, document)
        if not entries:
            raise InputError(
                f"{directory}: found no document {document!r}, neither included nor dropped; `phalanx data sample` "
                "prints names"
            ).with_facts(found=document)
        for entry in entries:
            print_figures(entry)
        return Answer({"documents": entries})
    if quarantine:
        lines = [row for row in account_entries(dataset) if row.get("fate") == "quarantined"]
        columns = ("source", "document", "step", "measure", "value", "limit", "excerpt")
        print_rows([{name: row.get(name) for name in columns} for row in lines])
        return Answer({"quarantine": lines})
    report = signed_report(dataset)
    print_figures(
        {
            "digest": dataset.digest,
            "signer": dataset.trust_statement,
            "tokenizer": f"{report['tokenizer']['kind']}, {report['tokenizer']['vocab_size']} tokens",
            "steps": ", ".join(step["name"] for step in report["steps"]) or "none",
        }
    )
    print_rows([{name: group[name] for name in _GROUP} for group in report["groups"]])
    print_rows([_source_row(source) for source in report["sources"]])
    return Answer({"directory": directory, "digest": dataset.digest, "signer": dataset.signer, **report})


def _source_row(source: dict[str, Any]) -> dict[str, Any]:
    left_out = {fate: sum(measure["raw_bytes"] for measure in source[fate].values()) for fate in _LEFT_OUT}
    return {
        "source": source["name"],
        "licence": source["licence"],
        "raw bytes": source["read"].get("raw_bytes", 0) + left_out["broken"],
        "kept": source["kept"].get("raw_bytes", 0),
        **left_out,
    }


def report(directory: DatasetDir, key: KeyFile = None, signer: Signer = None) -> Answer:
    """Write report.html into the directory of a dataset and print its path."""
    from phalanx.report import write_data_report

    open_given(directory, key, signer)
    page: Path = write_data_report(directory)
    typer.echo(page)
    return Answer({"report": page})
