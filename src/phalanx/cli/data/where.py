"""``phalanx data where``: where a document is in a dataset, and which steps of a run were given it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.cli.data.options import KeyFile, Signer

if TYPE_CHECKING:
    from phalanx.train.records.lineage import DocumentLineage

_SHOWN = 20


def where(
    document: Annotated[str, typer.Argument(metavar="DOC", help="A digest, a text file, or a document name.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="Run directory, finished or not.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option("--dataset", metavar="DIR", help="Dataset; default: the dataset of --run.")
    ] = None,
    signer: Signer = None,
    key: KeyFile = None,
    proof: Annotated[Path | None, typer.Option("--proof", metavar="FILE", help="Write a proof to a new file.")] = None,
) -> Answer:
    """Print where a dataset has a document and which steps and checkpoints of a run saw it, or prove its absence.

    A text matches if its NFC form equals the tokenised text: a text that a recipe masked or cut does not match. Steps
    are computed from the order of the run, and compared with the commitments of its lines.
    """
    from phalanx.cli.files import write_file
    from phalanx.data.shards import SealKey, open_dataset
    from phalanx.data.shards.lookup import find_document
    from phalanx.data.shards.proof import check_proof, prove_document

    if run_dir is None and dataset is None:
        raise typer.BadParameter("expected --run RUN_DIR or --dataset DIR")
    past = None
    if run_dir is not None:
        from phalanx.train.records.lineage import dataset_of, trace_document
        from phalanx.train.records.past_run import PastRun

        past = PastRun(run_dir)
        dataset, named = dataset_of(past, dataset)
        signer, key = signer or named.signer, key or named.key_file
    opened_dataset = open_dataset(dataset or Path(), signer, None if key is None else SealKey.from_file(key))
    asked = find_document(opened_dataset, document)
    document_proof = prove_document(opened_dataset, asked.digest)
    proven = check_proof(document_proof, str(dataset), signer)
    facts: dict[str, Any] = {
        "document": asked.digest,
        "named_by": asked.named_by,
        "dataset": opened_dataset.digest,
        "signer": opened_dataset.signer,
        "signer_was_named": opened_dataset.signer_was_named,
        "places": [vars(place) for place in proven.places],
        "complete": proven.is_complete,
    }
    lineage = None if past is None else trace_document(past, proven.places, dataset)
    if lineage is not None:
        facts["run"] = lineage.to_json()
    if proof is not None:
        write_file(proof, document_proof.to_bytes())
        facts["proof"] = str(proof)
    places = [
        f"{place.group}.{place.split}, document {place.document}, {place.tokens} tokens" for place in proven.places
    ]
    print_figures(
        {
            "document": f"{asked.digest}, by its {asked.named_by}",
            "in the dataset": "; ".join(places[:_SHOWN]) or "no (proven)",
            "trust": opened_dataset.trust_statement,
            **({} if lineage is None else _lineage_fields(lineage)),
            **({} if proof is None else {"proof": proof}),
        }
    )
    return Answer(facts)


def _lineage_fields(lineage: "DocumentLineage") -> dict[str, Any]:
    steps = [str(step.step) for step in lineage.steps]
    more = f", and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    by = sorted({step.committed_in or "nothing" for step in lineage.steps})
    return {
        "seen in steps": ", ".join(steps[:_SHOWN]) + more if steps else f"in none of {lineage.steps_done}",
        "committed to by": ", ".join(by) or None,
        "in checkpoints": ", ".join(map(str, lineage.checkpoints)) or None,
        "corpus": f"{lineage.corpus}, {'named in' if lineage.corpus_in_log else 'not named in'} the signed log",
    }
