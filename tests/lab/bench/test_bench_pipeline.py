"""The bench itself, with real processes and a model that is as small as can be."""

import json
from pathlib import Path

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.measure.workloads import Workload, pipeline_workloads
from phalanx.lab.bench.overhead.arm import ArmProcess, ArmSpec
from phalanx.lab.bench.overhead.pipeline import measure_pipeline
from phalanx.models import ModelConfig
from phalanx.train import PipelineRun

ARMS = ["plain", "unguarded", "guarded_light", "guarded_full"]


def test_the_two_models_have_the_names_that_scripts_rely_on() -> None:
    assert set(BENCHES) >= {"pipeline"}
    for quick in (True, False):
        assert [workload.model for workload in pipeline_workloads(quick)] == ["scratch-10m", "smollm2-135m"]
        assert all(w.run.train.batch_size * w.run.data.sequence_length >= 2048 for w in pipeline_workloads(quick))


@pytest.mark.slow
def test_an_arm_that_cannot_start_is_an_error_with_its_last_words(tiny: PipelineRun, tmp_path: Path) -> None:
    nowhere = tiny.model_copy(update={"model": ModelConfig(path=str(tmp_path / "nowhere"))})
    spec = ArmSpec(arm="plain", plain=True, run=nowhere, directory=str(tmp_path / "arm"), cache=str(tmp_path))

    with pytest.raises(TrainingError, match=r"arm 'plain' ended: .*nowhere"):
        ArmProcess(spec, {})


@pytest.mark.slow
def test_all_arms_are_measured_on_the_same_batches(tiny: PipelineRun) -> None:
    shifts = (("unguarded", "guarded_light"), ("unguarded", "guarded_full"))
    workload = Workload("tiny", tiny, steps=2, rounds=2, warm_ups=1, budget_s=60.0, shifts=shifts)

    result = measure_pipeline([workload], quick=True)

    rows = {row["arm"]: row for row in result["rows"]}
    assert json.loads(json.dumps(result, allow_nan=False))["name"] == "pipeline"
    assert list(rows) == ARMS
    assert len({row["loss_last"] for row in rows.values() if row["arm"] != "plain"}) == 1
    assert rows["guarded_light"]["audits_per_step"] == pytest.approx(2)
    assert rows["guarded_full"]["audits_per_step"] == pytest.approx(4)
    assert all(row["alarms"] in (None, 0) for row in rows.values())
    assert all(row["tokens_per_s"] > 0 and row["cpu_s_per_step"] > 0 for row in rows.values())
    assert (
        rows["guarded_full"]["bytes_per_step_worker-1>worker-2"] > rows["unguarded"]["bytes_per_step_worker-1>worker-2"]
    )
    assert result["machine"]["cores"] >= 1
