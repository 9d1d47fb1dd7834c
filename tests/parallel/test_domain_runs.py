"""Whole runs of a domain: what they leave, how they go on under other layouts, how they end when a rank dies."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from machine_patience import patience_s
from phalanx.checkpoint.export import export_model
from phalanx.checkpoint.save import write_synced
from phalanx.errors import ConfigError, PeerLostError
from phalanx.models import open_model, weights_digest
from phalanx.parallel.control import saving
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, load_run, train
from phalanx.train.records.run_changes import changes_between
from phalanx.train.sessions import hooks
from tiny_run_file import tiny_run_file

ROOT = Path(__file__).resolve().parents[2]

TINY = tiny_run_file("[checkpoint]\nevery = 2\n", held_out=9)
PHALANX = ("-m", "phalanx")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *PHALANX)
ALONE = "[pipeline]\nstages = 2\n"


def exists(pid):
    """Whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def make_run(tmp_path):
    def make(section, *overrides):
        path = tmp_path / "tiny.toml"
        path.write_text(TINY + section)
        return load_run(path, overrides)

    return make


def quietly(run, directory, **options):
    return train(run, directory, console=Console(file=io.StringIO(), width=200), **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """The same run by the other engine, in one process."""
    home = tmp_path_factory.mktemp("alone")
    (home / "tiny.toml").write_text(TINY.replace("every = 2", "every = 2\njournal = false") + ALONE)
    return quietly(load_run(home / "tiny.toml"), home / "run"), home / "run"


def stop_before_saving(monkeypatch, num_steps, act):
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            act()
        save(self, at)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)


def interrupt():
    raise KeyboardInterrupt


def check_same(run_dir, summary, alone):
    expected, directory = alone
    mine, theirs = read_metrics(run_dir / "metrics.jsonl"), read_metrics(directory / "metrics.jsonl")
    assert summary["status"] == "completed"
    assert [line["batch"] for line in mine] == [line["batch"] for line in theirs]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in mine] == pytest.approx([line[key] for line in theirs], rel=1e-5)
    for key in ("loss_first", "loss_last", "validation_perplexity_first", "validation_perplexity", "tokens", "steps"):
        assert summary[key] == pytest.approx(expected[key], rel=1e-5)


def ranks_of(monkeypatch):
    """Every set of ranks that is started from here on."""
    from phalanx.train.sessions import domain

    started = []

    class Noted(domain.LocalRanks):
        def start_ranks(self):
            started.append(self)
            super().start_ranks()

    monkeypatch.setattr(domain, "LocalRanks", Noted)
    return started


def kill_a_rank(run, directory, monkeypatch):
    """Let a run lose rank 1 before its second checkpoint; seconds until it ended, and the process ids of all ranks."""
    with monkeypatch.context() as patch:
        ranks, killed_at = ranks_of(patch), []

        def kill():
            killed_at.append(time.monotonic())
            os.kill(ranks[0].process_ids()[1], signal.SIGKILL)

        stop_before_saving(patch, 4, kill)
        with pytest.raises(PeerLostError, match=r"rank 1 ended with signal 9"):
            quietly(run, directory)
    return time.monotonic() - killed_at[0], ranks[0].process_ids().values()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_at_once_and_leaves_no_process(make_run, tmp_path, monkeypatch):
    seconds, pids = kill_a_rank(make_run("[parallel]\ndp = 2\nzero = 3\n"), tmp_path / "run", monkeypatch)

    # alone, it waits minutes for a peer that is silent; one that is dead costs a second
    assert seconds < patience_s(15)
    assert not any(exists(pid) for pid in pids)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(make_run, alone, tmp_path, monkeypatch):
    run = make_run("[parallel]\ndp = 2\nzero = 3\n")
    kill_a_rank(run, tmp_path / "run", monkeypatch)

    summary = quietly(run, tmp_path / "run", resume=True)

    assert summary["resumed_from"] == 2
    assert summary["world"] == {"processes": 2, "stages": 1, "dp": 2, "tp": 1, "pp": 1, "cp": 1}
    check_same(tmp_path / "run", summary, alone)


@pytest.mark.parametrize(
    ("section", "overrides", "words"),
    [
        ("tp = 3", (), "tp=3 does not divide 4 attention heads.*nearest that works is"),
        ("cp = 2\ncontext = 'ring'", ("model.attention=eager",), 'eager" asks for no fused.*or context = "ulysses"'),
    ],
)
def test_a_layout_that_cannot_work_is_refused_before_a_process_starts(
    make_run, tmp_path, monkeypatch, section, overrides, words
):
    started = ranks_of(monkeypatch)

    with pytest.raises(ConfigError, match=words):
        quietly(make_run(f"[parallel]\n{section}\n", *overrides), tmp_path / "run")

    assert started == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("[parallel]\ndp = 2\n[guard]\naudit_rate = 1.0\n", "exclude each other"),
        ("[parallel]\nzero = 1\n", "there is one"),
        ("[parallel]\ndp = 2\nzero = 2\ngradient_compression = 'fp16'\n", "all-reduce"),
        ("[parallel]\ndp = 2\nzero = 1\ngradient_compression = 'int8_gathers'\n", "share, with zero = 2 or 3, found 1"),
        ("[parallel]\ndp = 2\noffload = true\n", "zero = 2 or 3"),
        ("[parallel]\nsequence_parallel = true\n", "tensor parallel"),
        ("[parallel]\ndp = 2\npp = 2\nzero = 3\nschedule = 'zero-bubble'\n", "would lose gradients.*take zero = 2"),
        ("[parallel]\ndp = 2\npp = 2\nschedule = 'zero-bubble'\ngradient_compression = 'fp16'\n", "do not see them"),
        (
            "[parallel]\npp = 2\nschedule = 'zero-bubble'\nactivation_checkpointing = 'selective'\n",
            'goes back through a block twice.*"full" or "none"',
        ),
        ("[parallel]\ndp = 4\nreplicas = 2\n", "replicas = 2 needs zero = 2 or 3"),
        ("[parallel]\ndp = 3\nzero = 3\nreplicas = 2\n", "replicas = 2 does not divide dp = 3"),
        ("[parallel]\ndp = 2\nzero = 3\nreplicas = 2\n", "shares nothing; set zero to 0 or 1"),
        ("[parallel]\ntp = 2\ncompile = true\n", "exchange inside a block"),
        ("[parallel]\ndp = 2\ncompile = true\nactivation_checkpointing = 'selective'\n", 'take "full" or "none"'),
        ("[parallel]\npp = 2\ncompile = true\nschedule = 'zero-bubble'\n", "splits the backward pass"),
        ("[parallel.outer]\nevery = 2\n", "dp = 1; set dp to 2 or more"),
        ("[parallel]\ndp = 3\n[parallel.outer]\nevery = 2\nislands = 2\n", "islands = 2 does not divide dp = 3"),
        ("[parallel]\ndp = 2\nzero = 1\n[parallel.outer]\nevery = 2\n", "of an island have, and there is one"),
        ("[parallel]\ndp = 2\n[parallel.outer]\nevery = 4\n", "train.steps = 6 is not a multiple.*set it to 8"),
        (
            "[parallel]\ndp = 2\n[parallel.outer]\nevery = 6\n",
            "train.validate_every = 3 is not a multiple.*set it to 6",
        ),
        ("[parallel]\ndp = 2\n[parallel.outer]\nevery = 3\n", "checkpoint.every = 2 is not a multiple.*set it to 3"),
        (
            "[parallel]\ndp = 2\n[parallel.outer]\nevery = 3\n[leak_meter]\nevery = 4\n",
            "leak_meter.every = 4 is not a multiple.*set it to 3",
        ),
        ("[parallel]\ndp = 2\nring = 1\n", "unknown key"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(make_run, section, words):
    with pytest.raises(ConfigError, match=words):
        make_run(section)


def stopped(run, directory, monkeypatch):
    """Interrupt a run at step 4, with the checkpoint of step 2 as its newest."""
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 4, interrupt)
        assert quietly(run, directory)["status"] == "interrupted"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("dp = 2", "dp = 1", marks=pytest.mark.slow),
        pytest.param("dp = 1", "dp = 2\nzero = 3", marks=pytest.mark.slow),
        pytest.param("dp = 2\nzero = 3", "tp = 2", marks=pytest.mark.slow),
        pytest.param("tp = 2", 'pp = 2\nactivation_checkpointing = "full"', marks=pytest.mark.slow),
        pytest.param("pp = 2", "cp = 2", marks=pytest.mark.slow),
        pytest.param("dp = 2\nzero = 2", "dp = 2\ncp = 2\nzero = 3\nreplicas = 2", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_cut_anew_for_another_layout(make_run, alone, tmp_path, monkeypatch, before, after):
    stopped(make_run(f"[parallel]\n{before}\n"), tmp_path / "run", monkeypatch)

    summary = quietly(make_run(f"[parallel]\n{after}\n"), tmp_path / "run", resume=True)

    assert summary["resumed_from"] == 2
    check_same(tmp_path / "run", summary, alone)
    # the run directory has the new layout, so that the next resume needs no options
    assert after.partition("\n")[0] in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("[parallel]\ndp = 2\n[parallel.outer]\nevery = 1\n", "[parallel]\ndp = 2\n", "parallel.outer"),
        ("[parallel]\ndp = 2\n", '[parallel]\ndp = 2\ngradient_compression = "powersgd"\n', "gradient_compression"),
        ("[pipeline]\nstages = 2\n", "[parallel]\ndp = 2\n", "parallel"),
        ("[parallel]\ndp = 2\n", "[pipeline]\nstages = 2\n", "parallel"),
    ],
    ids=["islands", "compression", "pipeline to ranks", "ranks to pipeline"],
)
def test_a_resumed_run_keeps_what_is_more_than_a_layout(make_run, before, after, key):
    with pytest.raises(ConfigError, match=f"holds another run: .*{key}.*--from"):
        changes_between(make_run(before), make_run(after), "runs/x")


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        "[parallel]\ntp = 2\n",
        "[parallel]\npp = 2\n",
        "[parallel]\ndp = 1\n",
        "[parallel]\ncp = 2\ncontext = 'ring'\n",
        ALONE,
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_under_another(make_run, alone, tmp_path, monkeypatch, other):
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5, interrupt)
        stopped = quietly(make_run("[parallel]\ndp = 2\nzero = 3\n"), tmp_path / "first")

    summary = quietly(make_run(other), tmp_path / "second", from_run=tmp_path / "first")

    assert stopped["status"] == "interrupted"
    assert summary["resumed_from"] == 4
    assert summary["loss_last"] == pytest.approx(alone[0]["loss_last"], rel=1e-5)
    assert summary["validation_perplexity"] == pytest.approx(alone[0]["validation_perplexity"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "beside", "other"),
    [
        ("dp = 2\nzero = 3", "true", "[parallel]\ntp = 2\n"),
        ("tp = 2\ndp = 2\nzero = 1", "false", "[parallel]\ndp = 2\nzero = 3\n"),
        ("pp = 2", "true", ALONE),
    ],
)
def test_pieces_of_ranks_are_the_same_state_and_go_on_under_another_layout(
    make_run, tmp_path, monkeypatch, layout, beside, other
):
    section, keys = f"[parallel]\n{layout}\n", ("checkpoint.sharded=true", f"checkpoint.asynchronous={beside}")
    plain = quietly(make_run(section), tmp_path / "plain")
    pieces = quietly(make_run(section, *keys), tmp_path / "pieces")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5, interrupt)
        quietly(make_run(section, *keys), tmp_path / "stopped")

    further = quietly(make_run(other, "checkpoint.journal=false"), tmp_path / "other", from_run=tmp_path / "stopped")
    again = quietly(make_run(section, *keys), tmp_path / "stopped", resume=True)

    checkpoint = PastRun(tmp_path / "pieces").open_verified()
    whole = PastRun(tmp_path / "plain").open_verified()
    names = sorted(path.name for path in checkpoint.path.iterdir() if path.suffix == ".safetensors")
    assert len(names) >= 2
    assert all(".rank-" in name for name in names)
    for stage in whole.stages:
        assert_same_tensors(checkpoint.stage_tensors(stage), whole.stage_tensors(stage))
    assert pieces["final_weights_digest"] == plain["final_weights_digest"] == again["final_weights_digest"]
    assert (again["resumed_from"], further["resumed_from"]) == (4, 4)
    assert further["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-5)


def assert_same_tensors(first, second):
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


@pytest.mark.slow
def test_a_rank_that_cannot_write_its_piece_stops_no_run(make_run, tmp_path, monkeypatch):
    run = make_run("[parallel]\ndp = 2\nzero = 3\n", "checkpoint.sharded=true")
    writes = []

    def write(path, content):
        writes.append(path)
        if len(writes) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_synced(path, content)

    monkeypatch.setattr(saving, "write_synced", write)
    summary = quietly(run, tmp_path / "run")

    failed = [
        line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if "checkpoint_failed" in line
    ]
    assert summary["status"] == "completed"
    assert len(failed) == 1
    assert "rank 0 cannot write its state" in failed[0]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert PastRun(tmp_path / "run").open_verified().step == summary["steps"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("section", ["pp = 2", "tp = 2\npp = 2", "dp = 2\nzero = 3", "dp = 2\npp = 2\nzero = 2"])
def test_every_precision_goes_with_every_layout(make_run, section, precision):
    assert make_run(f"[parallel]\n{section}\n", f"train.precision={precision}").train.precision == precision


def test_what_only_a_domain_has_is_refused_to_stages(make_run):
    with pytest.raises(ConfigError, match=r'excludes train\.precision = "fp16".*an audit would'):
        make_run(ALONE, "train.precision=fp16")
    with pytest.raises(ConfigError, match=r'excludes optimizer\.kind = "adafactor".*two moments'):
        make_run(ALONE, "optimizer.kind=adafactor")


@pytest.mark.slow
def test_islands_that_were_stopped_end_with_the_bits_of_those_that_were_not(make_run, tmp_path, monkeypatch):
    section = "[parallel]\ndp = 2\n[parallel.outer]\nevery = 2\ncompression = 'int8'\n"
    run = make_run(section, "train.validate_every=0")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5, interrupt)
        quietly(run, tmp_path / "stopped")

    stopped = quietly(run, tmp_path / "stopped", resume=True)
    whole = quietly(run, tmp_path / "whole")
    # one process has one island's moments, and needs nothing of what joins islands
    other = quietly(
        make_run("[parallel]\n", "train.validate_every=0"), tmp_path / "other", from_run=tmp_path / "stopped"
    )

    assert stopped["resumed_from"] == 4
    assert stopped["final_weights_digest"] == whole["final_weights_digest"] == other["final_weights_digest"]


@pytest.mark.slow
def test_dropped_embeddings_of_a_shared_sequence_leave_all_ranks_the_same_weights(make_run, tmp_path, monkeypatch):
    section = "[parallel]\ntp = 2\nsequence_parallel = true\n"
    run = make_run(section, "train.validate_every=0", "model.architecture.embd_pdrop=0.3")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5, interrupt)
        quietly(run, tmp_path / "stopped")

    # after a resume all ranks have the weights of the first one, which has to be no news to the others
    stopped = quietly(run, tmp_path / "stopped", resume=True)

    assert stopped["resumed_from"] == 4
    assert stopped["final_weights_digest"] == quietly(run, tmp_path / "whole")["final_weights_digest"]


@pytest.mark.slow
def test_adapters_go_on_from_ranks_to_stages(make_run, tmp_path, monkeypatch):
    adapter = "[model.adapter]\nrank = 2\n"
    whole = quietly(make_run("[parallel]\n" + adapter), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5, interrupt)
        quietly(make_run("[parallel]\ndp = 2\nzero = 3\n" + adapter), tmp_path / "ranks")

    stages = quietly(
        make_run(ALONE + adapter, "checkpoint.journal=false"), tmp_path / "stages", from_run=tmp_path / "ranks"
    )

    assert stages["resumed_from"] == 4
    assert stages["loss_last"] == pytest.approx(whole["loss_last"], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_slices_is_a_transformers_model(make_run, tmp_path):
    run = make_run("[parallel]\ntp = 2\n")
    summary = quietly(run, tmp_path / "run")
    past = PastRun(tmp_path / "run")
    source = open_model(run.model, Path(os.environ["PHALANX_CACHE"]) / "models", run.train.seed)

    export_model(past.open_verified(), source, tmp_path / "model", adapter=None)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert weights_digest(model.named_parameters()) == summary["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [["-m", "phalanx"], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "phalanx"]]
)
def test_the_command_line_and_torchrun_run_the_same_file(make_run, alone, tmp_path, program):
    make_run("[parallel]\npp = 2\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, *program, "train", str(tmp_path / "tiny.toml"), "--run-dir", str(tmp_path / "run")]

    subprocess.run(command, check=True, env=environment, timeout=patience_s(250.0), cwd=tmp_path, capture_output=True)

    check_same(tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text()), alone)
    assert (tmp_path / "run" / "report.html").exists()
