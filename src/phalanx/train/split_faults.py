"""What a run file says of remote clients of a split, and what other sections do not go together with them."""

from collections.abc import Iterator
from typing import Any

from phalanx.data import BpeConfig

_THEIRS = "remote clients set these files in their client files, not the owner"


def split_fault(run: Any) -> str | None:
    """Describe the fault of a split's texts, or of their absence; None where they are valid."""
    return next(_faults(run, run.split is not None and bool(run.split.remote_clients)), None)


def _faults(run: Any, is_remote: bool) -> Iterator[str]:
    own_files = None if run.data.labelled is None else run.data.labelled.own
    talks = run.data.conversations
    if run.split is not None and own_files is not None and bool(own_files.train) == is_remote:
        has = "has train and test files" if is_remote else "has no train and test files"
        yield f"data.labelled.task {has}: a run with local clients needs one file for each; {_THEIRS}"
    if talks is not None and bool(talks.sources) == is_remote:
        yield (
            f"data.conversations.sources: not allowed; {_THEIRS}"
            if is_remote
            else "data.conversations.sources: missing; add at least one"
        )
    if not is_remote:
        return
    if run.train.epochs is not None:
        yield "train.epochs: only remote clients know their number of texts; set train.steps"
    if (own_files is None and talks is None) or isinstance(run.data.tokenizer, BpeConfig):
        yield (
            "split.remote_clients need labelled texts or conversations of their own, and a tokenizer that all "
            "parties have: set the classes of data.labelled.task, or data.conversations without sources, and "
            'data.tokenizer.kind = "model" or "file"'
        )
    if run.data.attention == "document":
        yield 'data.attention = "document": each conversation of a remote client is a separate row'
