"""A preview of a build on a sample of each source: which documents are kept, which are not, and why."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.build.all_passes import NoProgress, run_passes
from phalanx.data.build.finish import read_account
from phalanx.data.build.local import OneProcess
from phalanx.data.build.pieces import SourcePiece, files_of
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.records import RecordFile, decode_document
from phalanx.data.build.sift import DOCUMENTS
from phalanx.data.build.tally import ByteTally
from phalanx.data.build.work import BuildWorker

_MAX_FILES = 16
_EXCERPT = 300


@dataclass(frozen=True)
class Preview:
    """What a sample came to.

    Attributes:
        kept: Names and texts of documents that would be kept, at most as many as were asked for.
    """

    counts: dict[str, int]
    kept: list[dict[str, Any]]
    left_out: list[dict[str, Any]]
    edited: dict[str, dict[str, int]]


def preview_build(recipe: DataRecipe, documents: int, code_home: Path = Path()) -> Preview:
    """Take a sample of every source through all steps; nothing is left on the disk.

    Args:
        recipe: Recipe of the build. A rule that compares documents sees the sample alone, so it finds fewer.
        documents: Documents of each source, from the beginnings of files that are spread over the source.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-preview-") as place:
        output = recipe.output.model_copy(update={"excerpt": _EXCERPT})
        shown = recipe.model_copy(update={"output": output})
        worker = BuildWorker(shown, Path(place), code_home)
        pieces = [piece for number in range(len(recipe.sources)) for piece in _sample_pieces(worker, number, documents)]
        done = run_passes(worker, OneProcess(worker), pieces, NoProgress())
        tally = ByteTally()
        for summary in (summary_entry for summaries in done for summary_entry in summaries):
            tally.merge_tally(ByteTally.from_json(summary["tally"]))
        samples = [
            {"source": recipe.source_names[piece.source], "document": document.name, "text": document.text[:_EXCERPT]}
            for piece, summaries in zip(pieces, done, strict=True)
            for document in map(
                decode_document, RecordFile(worker.work_store.work_directory(summaries[-1]["key"]) / DOCUMENTS)
            )
        ]
        left_out = [entry for summaries in done for entry in read_account(worker.work_store, summaries)]
    counts = {"kept": len(samples), **_by_step(tally)}
    return Preview(counts, samples, left_out, tally.by_step("edited"))


def _by_step(tally: ByteTally) -> dict[str, int]:
    counts: dict[str, int] = {}
    for fate in ("broken", "dropped", "quarantined"):
        for step, measures in tally.by_step(fate).items():
            counts[f"{fate} by {step}" if fate != "broken" else fate] = measures["documents"]
    return counts


def _sample_pieces(worker: BuildWorker, number: int, documents: int) -> Sequence[SourcePiece]:
    files = files_of(worker.open_recipe_source(number))
    if files is None:
        return [SourcePiece(number, limit=documents)]
    read = [position for position, file in enumerate(files) if file.passed_over is None]
    count = min(len(read), _MAX_FILES, documents)
    chosen = sorted({read[index * len(read) // count] for index in range(count)})
    return [SourcePiece(number, position, (files[position].name,), limit=-(-documents // count)) for position in chosen]
