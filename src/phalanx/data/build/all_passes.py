"""All passes over all pieces, with the decisions between them; a build and its preview both run them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from phalanx.data.build.decision import Summary, apply_corpus_rule
from phalanx.data.build.local import BuildEngine
from phalanx.data.build.passes import BuildPass
from phalanx.data.build.pieces import SourcePiece
from phalanx.data.build.tally import LEFT_OUT, ByteTally
from phalanx.data.build.work import BuildWorker, Task


class BuildProgress(Protocol):
    """Something that is told how far a build is."""

    def begin_phase(self, phase: str, pieces: int, size_bytes: int) -> None:
        """Tell that a phase begins; `size_bytes` is 0 where it is not known."""

    def finish_piece(self, size_bytes: int, left_out: dict[str, int]) -> None:
        """Tell that a piece is done, and how many documents it left out, by step."""


class NoProgress:
    """Shows nothing."""

    def begin_phase(self, phase: str, pieces: int, size_bytes: int) -> None:
        """Pass over it."""

    def finish_piece(self, size_bytes: int, left_out: dict[str, int]) -> None:
        """Pass over it."""


def run_passes(
    worker: BuildWorker, engine: BuildEngine, pieces: Sequence[SourcePiece], progress: BuildProgress
) -> list[list[Summary]]:
    """Take every piece through every pass; return the summaries of each piece, pass by pass."""
    done: list[list[Summary]] = [[] for _ in pieces]
    for build_pass in worker.build_passes:
        tasks = _pass_tasks(worker, build_pass, pieces, [summaries[-1:] for summaries in done], progress)
        phase = "read" if build_pass.number == 0 else f"pass {build_pass.number + 1} of {len(worker.build_passes)}"
        for summary, summaries in zip(
            report_results(phase, engine.perform_tasks(tasks), pieces, progress), done, strict=True
        ):
            summaries.append(summary)
    return done


def _pass_tasks(
    worker: BuildWorker,
    one: BuildPass,
    pieces: Sequence[SourcePiece],
    before: Sequence[list[Summary]],
    progress: BuildProgress,
) -> Iterator[Task]:
    if one.decided_step is None:
        return ({"act": "sift", "pass": 0, "piece": piece.to_json()} for piece in pieces)
    recipe = worker.recipe
    progress.begin_phase(f"decide {recipe.step_names[one.decided_step]}", 1, 0)
    last = [summary for (summary,) in before]
    shares = apply_corpus_rule(worker, one.decided_step, last, [recipe.source_names[piece.source] for piece in pieces])
    return (
        {"act": "sift", "pass": one.number, "piece": piece.to_json(), "input": summary["key"], "decided": share}
        for piece, summary, share in zip(pieces, last, shares, strict=True)
    )


def report_results(
    phase: str, results: Iterable[Summary], pieces: Sequence[SourcePiece], progress: BuildProgress
) -> Iterator[Summary]:
    """Yield results, one a piece, and tell of each."""
    progress.begin_phase(phase, len(pieces), sum(piece.size_bytes for piece in pieces))
    for piece, result in zip(pieces, results, strict=True):
        left_out: dict[str, int] = {}
        tally = ByteTally.from_json(result.get("tally", []))
        for fate in LEFT_OUT:
            for step, measures in tally.by_step(fate).items():
                left_out[step] = left_out.get(step, 0) + measures["documents"]
        progress.finish_piece(piece.size_bytes, left_out)
        yield result
