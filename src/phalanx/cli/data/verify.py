"""``phalanx data verify``: check every byte of a dataset, or a proof about one document."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.cli.data.options import KeyFile, Signer, open_given


def verify(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="Directory of a dataset.")] = None,
    signer: Signer = None,
    key: KeyFile = None,
    proof: Annotated[
        Path | None, typer.Option("--proof", metavar="FILE", help="Proof of `phalanx data where`.")
    ] = None,
) -> Answer:
    """Check every byte that a dataset's signature covers, or a proof about one document, without the dataset.

    Without --signer any signing key is accepted: the output names the key, but does not verify whose it is.
    """
    if (directory is None) == (proof is None):
        raise typer.BadParameter("expected either a dataset or --proof FILE")
    return _verify_proof(proof, signer) if proof is not None else _verify_dataset(directory or Path(), signer, key)


def _verify_dataset(directory: Path, signer: str | None, key: Path | None) -> Answer:
    dataset = open_given(directory, key, signer)
    files = sum(1 for _ in dataset.verify())
    figures = {
        "verdict": "all bytes match the signature",
        "trust": dataset.trust_statement,
        "digest": dataset.digest,
        "documents": dataset.manifest.documents,
        "tokens": dataset.manifest.tokens,
        "files": files,
        "account": _check_account(dataset),
        "encrypted": dataset.manifest.seal is not None,
    }
    print_figures(figures)
    return Answer({**figures, "signer": dataset.signer, "signer_was_named": dataset.signer_was_named})


def _check_account(dataset: Any) -> str:
    """Check the additions of a build to shards: the tokenizer beside them, and the account of every byte."""
    from phalanx.data.build.finish import REPORT_FILE
    from phalanx.data.build.look import check_tokenizer, verify_account

    if REPORT_FILE not in dataset.manifest.files:
        return "none: not built by phalanx data build"
    check_tokenizer(dataset)
    verify_account(dataset)
    return "sums match to the byte"


def _verify_proof(path: Path, signer: str | None) -> Answer:
    from phalanx.data.shards.proof import check_proof, load_proof

    proof = load_proof(path)
    proven = check_proof(proof, str(path), signer)
    places = [
        f"{document.group}.{document.split}, document {document.document}, {document.tokens} tokens"
        for document in proven.places
    ]
    figures = {
        "document": proof.digest,
        "proven": "is in the dataset" if places else "is not in the dataset",
        **{f"  place {number}": place for number, place in enumerate(places, 1)},
        "further places": "none" if proven.is_complete else "the dataset has matches that the proof does not list",
        "dataset": proof.statement.dataset,
        "signed by": proof.signer + ("" if signer is not None else ", not verified: confirm it with --signer"),
        "rests on": "provided that the signer sorted the index; the tree shows that it was not changed since",
    }
    print_figures(figures)
    facts = {
        "document": proof.digest,
        "present": bool(places),
        "places": [vars(document) for document in proven.places],
        "complete": proven.is_complete,
        "dataset": proof.statement.dataset,
        "signer": proof.signer,
        "signer_was_named": signer is not None,
    }
    return Answer(facts)
