"""The bench of layouts: rows beside one process, peers and plan; what is finished is kept."""

import importlib.util
import json

import pytest

from phalanx.lab.bench import BENCHES, KEEPING_ROWS
from phalanx.lab.bench.parallel import parallel as bench
from phalanx.lab.bench.parallel.arms import ALONE, ENGINE, PEERS
from phalanx.lab.bench.parallel.interleave import LayoutTurns, TurnSpec, take_turns
from phalanx.lab.bench.parallel.layouts import SHIFTS, InterleavedLayouts
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.parallel import ParallelConfig

ROW = {
    "arm",
    "layout",
    "ranks",
    "max_rel_loss_diff",
    "lossy",
    "sent_bytes_per_step",
    "tokens_per_s",
    "over_alone",
    "peer",
    "peer_tokens_per_s",
    "over_peer",
    "cpu_s",
    "peer_cpu_s",
    "reason",
    "peak_memory_bytes",
    "planned_memory_bytes",
}
PLAN = {
    "layout",
    "ranks",
    "planned_step_s",
    "step_s",
    "step_ratio",
    "planned_cpu_s",
    "cpu_s",
    "cpu_ratio",
    "planned_bubble",
    "bubble",
    "bubble_ratio",
    "planned_idle",
    "idle",
}


@pytest.fixture
def short(tiny):
    return tiny.model_copy(update={"train": tiny.train.model_copy(update={"steps": 8})})


def has(*modules):
    return all(importlib.util.find_spec(module) is not None for module in modules)


@pytest.mark.slow
def test_a_layout_stands_beside_one_process_its_peer_and_the_plan(short, tmp_path):
    what = [SHIFTS[0], InterleavedLayouts(({"dp": 2, "zero": 3},), ("torch FSDP2",), name="shared")]
    finished = bench.open_layout_rows(tmp_path / "rows.jsonl", short, "this code")

    result = bench.measure_parallel(what, short, finished, tmp_path / "cache", quick=True)

    json.dumps(result, allow_nan=False)
    rows = {(row["arm"], row["layout"]): row for row in result["rows"]}
    ours, theirs = rows[ENGINE, "dp=2 zero=3"], rows["torch FSDP2", "dp=2 zero=3"]
    assert set(ours) == ROW | {"memory_ratio"}
    assert ours["max_rel_loss_diff"] < 1e-5
    assert theirs["max_rel_loss_diff"] < 1e-5
    assert ours["sent_bytes_per_step"] > 0
    assert ours["peer"] == "torch FSDP2"
    assert ours["over_peer"] > 0
    assert ours["planned_memory_bytes"] > 0
    assert theirs["peak_memory_bytes"] > 0
    assert len(rows[ALONE, "one rank"]["losses"]) == 8
    assert [row["layout"] for row in result["plan"]] == ["one rank", "dp=2 zero=3"]
    assert all(set(row) == PLAN for row in result["plan"])
    assert result["missing"] == 0

    again = bench.measure_parallel(what, short, finished, tmp_path / "cache", quick=True, only_finished=True)
    assert again["rows"] == result["rows"]


def test_what_was_not_measured_is_missing_and_not_made_up(short, tmp_path):
    finished = bench.open_layout_rows(tmp_path / "rows.jsonl", short, "other code")

    result = bench.measure_parallel(SHIFTS[:2], short, finished, tmp_path / "cache", quick=True, only_finished=True)

    assert (result["missing"], result["rows"], result["plan"]) == (2, [], [])


@pytest.mark.slow
def test_an_arm_that_cannot_run_says_why_and_holds_nobody_up(short, tmp_path):
    specs = [TurnSpec("nobody's trainer", ParallelConfig(dp=2), 1), TurnSpec(ALONE, ParallelConfig(), 1)]
    prepared(short, tmp_path / "cache")

    with RankForkServer(tmp_path / "host") as host:
        broken, alone = take_turns(host, specs, short, tmp_path / "cache", turns=2)

    assert "KeyError" in broken.reason
    assert broken.losses == []
    assert (alone.reason, len(alone.losses)) == (None, 2)


def test_turns_that_are_neighbours_in_time_are_compared():
    spec = TurnSpec(ENGINE, ParallelConfig(), 2)
    # the machine was twice as slow in the last turn
    mine = LayoutTurns(spec, walls=[[9.0, 9.0], [1.0, 1.0], [2.0, 2.0]], cpus=[[9.0, 9.0], [1.0, 1.0], [1.0, 1.0]])
    theirs = LayoutTurns(spec, walls=[[1.0, 1.0], [3.0, 3.0], [6.0, 6.0]])

    assert mine.faster_than(theirs) == 3.0
    # the first two steps warm up
    assert mine.cpu_s() == 1.0
    assert mine.step_s() == 1.5


def test_every_shift_names_arms_that_are_there_and_layouts_that_work():
    names = {shift.name for shift in SHIFTS}

    assert {peer for shift in SHIFTS for peer in shift.peers} <= set(PEERS)
    assert len(names) == len(SHIFTS)
    assert all(shift.peers or shift.no_peer or shift.name == "one rank" for shift in SHIFTS)
    assert len({str(config) for shift in SHIFTS for config in shift.parallel_configs()}) >= 18
    assert "parallel" in BENCHES
    assert "parallel" in KEEPING_ROWS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("peer", [name for name in PEERS if "DeepSpeed" not in name or has("deepspeed")])
def test_every_peer_that_is_installed_trains_the_same_curve(peer, short, tmp_path):
    if "accelerate" in peer and not has("accelerate"):
        pytest.skip("accelerate is not installed; it is in the extra `benchmark`")
    prepared(short, tmp_path / "cache")
    specs = [TurnSpec(ALONE, ParallelConfig(), 8), TurnSpec(peer, ParallelConfig(dp=2), 8)]

    with RankForkServer(tmp_path / "host") as host:
        alone, other = take_turns(host, specs, short, tmp_path / "cache", turns=1)

    assert other.reason is None
    assert other.losses == pytest.approx(alone.losses, rel=1e-5)


def prepared(run, cache):
    """Model and tokens in the cache, so that ranks do not make them at once."""
    from phalanx.data import prepare_corpus
    from phalanx.models import open_model

    source = open_model(run.model, cache / "models", run.train.seed)
    prepare_corpus(run.data, cache / "data", run.train.seed, source.tokenizer_path, lambda *_: None)
