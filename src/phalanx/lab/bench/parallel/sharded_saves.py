"""A bench of saves: pieces of ranks beside a save through rank 0 and torch's distributed checkpoint (DCP).

``python -m phalanx.lab.bench.parallel.sharded_saves OUT.json [--ranks 2] [--layers 14] [--width 768] [--rounds 7]``

Ranks of ZeRO 3 save the same state (weights and both moments in float32) to one disk and restore it, a way after the
other in turns. All ways force their files to disk. The first two hash and sign what they write and check it on the way
back; DCP does neither. Times are until the last rank is done; memory is what the neediest rank added to its process,
measured by ranks of their own, since giving freed memory back at once costs time.
"""

import shutil
import statistics
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import (
    cache_directory,
    median_ratio,
    print_progress,
    rotate,
    run_program,
    scratch_directory,
)
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.lab.bench.parallel.layouts import with_layout
from phalanx.lab.bench.parallel.rank_saves import PIECES, WAYS, SaveSpec
from phalanx.lab.bench.parallel.ranks import ArmRanks, RankForkServer
from phalanx.models import open_model
from phalanx.parallel import ParallelConfig
from phalanx.planner.model.read import shape_of
from phalanx.train import DomainRun

Answers = dict[str, list[list[dict[str, Any]]]]
"""By way: of each turn the answers of all ranks."""

_ACTS = ("save", "restore")


def measure_saves(ranks: int = 2, layers: int = 14, width: int = 768, rounds: int = 7) -> dict[str, Any]:
    """Measure all ways in one run.

    Returns:
        Numbers in the state, and a row each way. Ratios are of neighbours in time, above 1 where pieces of ranks
        take less.
    """
    run, cache = saved_run(ranks, layers, width), cache_directory()
    source = open_model(run.model, cache / "models", run.train.seed)
    with scratch_directory() as directory, RankForkServer(directory / "host") as host:
        timed = _take_turns(host, SaveSpec(run=run, cache=str(cache.resolve())), directory, rounds)
        for_memory = SaveSpec(run=run, cache=str(cache.resolve()), measures_memory=True)
        weighed = _take_turns(host, for_memory, directory, 1)
    return {
        "parameters": shape_of(source.hub_config_dict).num_parameters,
        "layout": str(run.parallel.planned_layout),
        "rows": [_way_row(way, timed, weighed) for way in WAYS],
    }


def saved_run(ranks: int, layers: int, width: int) -> DomainRun:
    """A run of which ranks share everything, with short sequences, since its steps are not measured."""
    run = scratch_run(width)
    architecture = {**(run.model.architecture or {}), "n_layer": layers}
    changed = run.model_copy(
        update={
            "model": run.model.model_copy(update={"architecture": architecture}),
            "data": run.data.model_copy(update={"sequence_length": 16}),
            "train": run.train.model_copy(update={"batch_size": ranks, "microbatches": 1}),
        }
    )
    return with_layout(changed, ParallelConfig(dp=ranks, zero=3))


def _take_turns(host: RankForkServer, spec: SaveSpec, directory: Path, rounds: int) -> Answers:
    """Let all ways save and restore in turns; the first turn warms up."""
    answers: Answers = {way: [] for way in WAYS}
    with host.make_crew("saves", "save", spec.run.parallel.num_ranks, {"spec": spec.model_dump_json()}) as crew:
        for turn in range(1 + rounds):
            for way in rotate(WAYS, turn):
                answer = _save_once(crew, way, directory / "saved")
                answers[way] += [answer] if turn else []
            print_progress(f"saves: turn {turn + 1} of {1 + rounds}")
    return answers


def _save_once(crew: ArmRanks, way: str, directory: Path) -> list[dict[str, Any]]:
    directory.mkdir()
    answer = crew.ask_all(way=way, directory=str(directory))
    size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    shutil.rmtree(directory)
    return [{**rank, "size_bytes": size_bytes} for rank in answer]


def _way_row(way: str, timed: Answers, weighed: Answers) -> dict[str, Any]:
    row: dict[str, Any] = {
        "way": way,
        "is_equal": all(rank["is_equal"] for turn in (*timed[way], *weighed[way]) for rank in turn),
        "size_bytes": timed[way][0][0]["size_bytes"],
    }
    for act in _ACTS:
        walls, pieces = _walls(timed[way], act), _walls(timed[PIECES], act)
        row[act] = {
            "wall_s": statistics.median(walls),
            "wall_s_each": walls,
            "cpu_s": statistics.median(sum(rank[act]["cpu_s"] for rank in turn) for turn in timed[way]),
            "peak_bytes_by_rank": [rank[act]["peak_bytes"] for rank in weighed[way][0]],
            "wall_over_pieces": median_ratio(walls, pieces),
        }
    return row


def _walls(turns: list[list[dict[str, Any]]], act: str) -> list[float]:
    return [max(rank[act]["wall_s"] for rank in turn) for turn in turns]


if __name__ == "__main__":
    run_program("sharded-saves", measure_saves)
