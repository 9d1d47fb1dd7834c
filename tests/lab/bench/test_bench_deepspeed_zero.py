"""The bench of DeepSpeed's ZeRO beside the engine's own: every arm learns alike, wherever its state lies."""

from pathlib import Path

import pytest

from phalanx.lab.bench.parallel import deepspeed_zero
from phalanx.parallel.deepspeed.extra import why_no_extra
from phalanx.train import PipelineRun

LACKING = why_no_extra()


def test_every_zero_of_deepspeed_stands_beside_the_same_of_our_own(tmp_path: Path) -> None:
    pairs = deepspeed_zero.zero_pairs(2, tmp_path)

    for pair in pairs:
        own, *joined = pair.turn_specs()
        assert own.deepspeed is None
        assert {spec.deepspeed.zero for spec in joined if spec.deepspeed} == {own.config.zero}
        assert {spec.config.dp for spec in joined} == {own.config.dp}
    assert [pair.own.zero for pair in pairs] == [1, 2, 3, 3]
    homes = [section.offload_parameters for pair in pairs for section in pair.sections]
    assert homes == ["none", "none", "none", "cpu", "nvme"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_deepspeed_learns_as_one_process_does_and_so_do_we(
    tiny: PipelineRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))

    result = deepspeed_zero.measure_pairs(tiny, ranks=2, steps=4)

    assert [(row["section"], row["zero"]) for row in result["rows"]] == [
        *((section, zero) for zero in (1, 2, 3) for section in ("parallel", "deepspeed")),
        ("parallel", 3),
        ("deepspeed", 3),
        ("deepspeed", 3),
    ]
    assert all(row["max_rel_loss_diff"] < 1e-5 for row in result["rows"])
    assert all(row["peak_memory_bytes"] > 0 for row in result["rows"])
    assert all((row["over_own"] is None) == (row["section"] == "parallel") for row in result["rows"])
