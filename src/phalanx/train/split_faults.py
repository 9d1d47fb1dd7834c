"""What a run file says of remote clients of a split, and what other sections do not go together with them."""

from collections.abc import Iterator
from typing import Any

from phalanx.data import BpeConfig

_THEIRS = "remote clients name theirs in their client files, and the owner has none"


def split_fault(run: Any) -> str | None:
    """Describe the fault of a split's texts, or of their absence; None where they are valid."""
    return next(_faults(run, run.split is not None and bool(run.split.remote_clients)), None)


def _faults(run: Any, is_remote: bool) -> Iterator[str]:
    own_files = None if run.data.labelled is None else run.data.labelled.own
    talks = run.data.conversations
    if run.split is not None and own_files is not None and bool(own_files.train) == is_remote:
        has = "names train and test files" if is_remote else "names no train and test files"
        yield f"data.labelled.task {has}: where the run plays the clients, it has a file of each; {_THEIRS}"
    if talks is not None and bool(talks.sources) == is_remote:
        yield (
            f"data.conversations.sources: are there; {_THEIRS}"
            if is_remote
            else "data.conversations.sources: missing; give some"
        )
    if not is_remote:
        return
    if run.train.epochs is not None:
        yield "train.epochs: only remote clients know how many texts they have; give train.steps"
    if (own_files is None and talks is None) or isinstance(run.data.tokenizer, BpeConfig):
        yield (
            "split.remote_clients learn labelled texts or conversations of their own, with a tokenizer that all "
            "parties have: give data.labelled.task its classes, or data.conversations without sources, and "
            'data.tokenizer the kind "model" or "file"'
        )
    if run.data.attention == "document":
        yield 'data.attention = "document": each conversation of a remote client has a row of its own'
