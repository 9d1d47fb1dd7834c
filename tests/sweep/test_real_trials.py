"""Real trials: their value is that of the verified checkpoint, and a search that is killed loses none."""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_trials import write_files
from rich.console import Console

from phalanx.errors import CheckpointError
from phalanx.planner.cost.memory import rank_memory
from phalanx.planner.layout import Layout
from phalanx.sweep import RunTrials, load_sweep
from phalanx.sweep.journal import JOURNAL
from phalanx.telemetry import read_metrics
from phalanx.train.setup.planned_memory import planned_bytes, planned_recipe, planned_shape

_SEARCH = """
import contextlib, io, os, signal, sys
from pathlib import Path
from rich.console import Console
from phalanx.sweep import RunTrials, Sweep, load_sweep


class Mortal(RunTrials):
    def train_trial(self, run, directory, on_validation):
        def die(steps, result):
            on_validation(steps, result)
            if directory.name == sys.argv[2] and steps == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        return super().train_trial(run, directory, die)


trials = Mortal(lambda directory: contextlib.nullcontext(Console(file=io.StringIO())))
sweep = load_sweep(Path("sweep.toml"), ["again.seeds=[5, 12]"])
Sweep(sweep, Path("found"), trials, print).run_search(resume=sys.argv[1] == "resume")
"""


def quiet_trials():
    return RunTrials(lambda _directory: contextlib.nullcontext(Console(file=io.StringIO())))


def told_loss(directory):
    return math.log(read_metrics(directory / "metrics.jsonl")[-1]["validation_perplexity"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep, the run of one trial, and its directory; not to be changed."""
    home = tmp_path_factory.mktemp("trial")
    run = load_sweep(write_files(home)).make_run({"optimizer.lr": 0.03})
    told = []
    trials = quiet_trials()
    status = trials.train_trial(run, home / "runs" / "0000", lambda step, result: told.append((step, result.own)))
    return home, run, home / "runs" / "0000", status, told


def test_the_owner_finds_in_the_checkpoint_what_an_honest_run_has_told(trained):
    _, run, directory, status, told = trained

    loss = quiet_trials().measure_loss(run, directory, "validation")

    assert status == "completed"
    assert [step for step, _ in told] == [3, 6, 9]
    assert loss == pytest.approx(told_loss(directory), abs=1e-6) == pytest.approx(math.log(told[-1][1]), abs=1e-6)


def copy_of(directory, place):
    shutil.copytree(directory, place)
    return place


def test_figures_that_a_trial_writes_into_its_files_count_for_nothing(trained, tmp_path):
    _, run, directory, _, _ = trained
    liar = copy_of(directory, tmp_path / "liar")
    summary = json.loads((liar / "summary.json").read_text())
    (liar / "summary.json").write_text(json.dumps({**summary, "validation_perplexity": 1.0}))
    rows = [{**row, "validation_perplexity": 1.0, "loss": 0.0} for row in read_metrics(liar / "metrics.jsonl")]
    (liar / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert told_loss(liar) == 0.0
    assert quiet_trials().measure_loss(run, liar, "validation") == pytest.approx(told_loss(directory), abs=1e-6)


def test_the_checkpoint_of_another_run_is_not_measured_as_this_trial(trained, tmp_path):
    home, run, directory, _, _ = trained
    # longer training, or training on other text, under the name of this trial
    other = load_sweep(home / "sweep.toml").make_run({"optimizer.lr": 0.05})
    with pytest.raises(CheckpointError, match="another run file"):
        quiet_trials().measure_loss(other, directory, "validation")
    liar = copy_of(directory, tmp_path / "liar")
    text = (liar / "config.toml").read_text()
    assert "lr = 0.03" in text
    (liar / "config.toml").write_text(text.replace("lr = 0.03", "lr = 0.05"))

    with pytest.raises(CheckpointError, match="digest"):
        quiet_trials().measure_loss(other, liar, "validation")
    assert run != other


def test_a_weight_that_was_altered_on_the_disk_is_not_measured(trained, tmp_path):
    _, run, directory, _, _ = trained
    liar = copy_of(directory, tmp_path / "liar")
    shard = next((liar / "checkpoints").glob("step-*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CheckpointError):
        quiet_trials().measure_loss(run, liar, "validation")


def test_a_trial_that_cannot_fit_is_told_with_both_figures(tmp_path):
    sweep = load_sweep(write_files(tmp_path))
    wide = sweep.make_run({"model.architecture.n_embd": 2048})

    assert quiet_trials().find_excess(sweep.make_run({}), 100) is None
    assert "allowed are 100 MiB" in (quiet_trials().find_excess(wide, 100) or "")


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_of_a_trial_is_counted_once_and_a_middle_one_with_its_shadow(tmp_path, stages):
    space = '"model.architecture.n_layer" = { choices = [3, 4] }'
    sweep = load_sweep(write_files(tmp_path, space=space))
    run = sweep.make_run({"model.architecture.n_layer": 3, "pipeline.stages": stages})
    shape = planned_shape(run.model)
    recipe = planned_recipe(run, shape)
    sizes = [rank_memory(shape, Layout(pp=stages), recipe, rank).total_bytes for rank in range(stages)]

    assert planned_bytes(run) == sum(sizes) + (sizes[1] if stages == 3 else 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_search_that_is_killed_in_a_trial_goes_on_and_ends_as_one_that_was_not(tmp_path):
    journals = {}
    for name, victims in (("whole", []), ("killed", ["0001", "0002-seed-5"])):
        home = tmp_path / name
        home.mkdir()
        write_files(home, "trials = 3", 'sampler = "random"', "seed = 5")
        if name == "killed":
            journals["victims"] = victims
        modes = [("begin", victims[0]), ("resume", victims[1]), ("resume", "none")] if victims else [("begin", "none")]
        for mode, victim in modes:
            done = subprocess.run(
                [sys.executable, "-c", _SEARCH, mode, victim],
                cwd=home,
                env={**os.environ, "PHALANX_CACHE": str(tmp_path / "cache")},
                capture_output=True,
                text=True,
                check=False,
            )
            dies = victim != "none" and (home / "found" / victim).exists()
            assert done.returncode == (-signal.SIGKILL if dies else 0), done.stderr[-2000:]
        journals[name] = (home / "found" / JOURNAL).read_text()

    assert journals["killed"] == journals["whole"]
    assert Path(tmp_path / "killed" / "found" / "sweep.json").exists()
