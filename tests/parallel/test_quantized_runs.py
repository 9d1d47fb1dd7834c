"""Whole runs with few bits: a stopped one goes on to the same bits, and no file of it holds code."""

import io
import json

import pytest
from rich.console import Console

from phalanx.config.extras import has_bitsandbytes
from phalanx.errors import ConfigError
from phalanx.telemetry import read_metrics
from phalanx.train import load_run, train
from phalanx.train.sessions import hooks
from phalanx.train.setup.preflight import require_extras
from tiny_run_file import tiny_run_file

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
ADAPTER = '[model.adapter]\nrank = 64\ntargets = ["c_attn", "c_fc"]\nquantize = "nf4"\n'
TINY = tiny_run_file("[checkpoint]\nevery = 2\njournal = false\n", held_out=9) + ADAPTER
RANKS, STAGES = "[parallel]\n", "[pipeline]\nstages = 3\n"
IN_BYTES = ("optimizer.kind=adamw8bit",)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def make_run(tmp_path):
    def make(section, *overrides):
        (tmp_path / "tiny.toml").write_text(TINY + section)
        return load_run(tmp_path / "tiny.toml", overrides)

    return make


def quietly(run, directory, **options):
    return train(run, directory, console=Console(file=io.StringIO(), width=200), **options)


class StoppedError(Exception):
    """The run ends here."""


@NEEDS_QUANT
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        (RANKS, IN_BYTES),
        (RANKS, (*IN_BYTES, "parallel.dp=2", "checkpoint.asynchronous=true")),
        (RANKS, (*IN_BYTES, "parallel.dp=2", "parallel.zero=1", "checkpoint.sharded=true")),
        (STAGES, IN_BYTES),
    ],
    ids=["parallel", "asynchronous", "sharded", "pipeline"],
)
def test_a_stopped_run_goes_on_to_the_same_bits_and_stores_no_pickle(
    make_run, tmp_path, monkeypatch, engine, overrides
):
    run = make_run(engine, *overrides)
    quietly(run, tmp_path / "whole")
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 4:
            raise StoppedError
        save(self, at)

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        quietly(run, tmp_path / "stopped")
    quietly(run, tmp_path / "stopped", resume=True)

    whole, stopped = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "stopped"))
    assert stopped["resumed_from"] == 2
    assert stopped["final_weights_digest"] == whole["final_weights_digest"]
    stored = [path for path in (tmp_path / "whole" / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in stored} <= {".json", ".safetensors", ".toml"}
    assert not [path for path in stored if b"absmax" in path.read_bytes()]
    assert [path for path in stored if b"exp_avg_8bit/" in path.read_bytes()]


@pytest.mark.parametrize(("engine", "overrides"), [(RANKS, IN_BYTES), (RANKS, ()), (STAGES, ())])
def test_without_the_package_a_run_is_refused_before_anything_starts(make_run, monkeypatch, engine, overrides):
    monkeypatch.setattr("phalanx.config.extras.has_bitsandbytes", lambda: False)

    with pytest.raises(ConfigError, match=r'= "(nf4|adamw8bit)": needs bitsandbytes, which is not installed'):
        require_extras(make_run(engine, *overrides))


@NEEDS_QUANT
@pytest.mark.slow
@pytest.mark.parametrize("layout", [("parallel.dp=2", "parallel.zero=1"), ("parallel.pp=2",)], ids=["dp", "pp"])
def test_ranks_learn_beside_few_bits_what_one_process_learns(make_run, tmp_path, layout):
    losses = []
    for name, more in (("one", ()), ("many", layout)):
        quietly(make_run(RANKS, *IN_BYTES, *more), tmp_path / name)
        losses.append([line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")])

    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
