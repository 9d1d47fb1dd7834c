"""Strangers in processes of their own recompute runs of real workers, one of which lied, also on other processors."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lying_owner import LyingOwner, sign_publication
from rich.console import Console
from test_erasure import TEXTS, write_dataset, write_run_file
from test_reverify import change_clip, publish, recompute

from forked_commands import ForkedCommands
from forked_workers import forked_workers
from phalanx.errors import VerificationError
from phalanx.governance.passport import PassportChoice, make_passport
from phalanx.governance.publication import open_publication
from phalanx.lab.attacks import attackers_of
from phalanx.pipeline import AuditDraw
from phalanx.train import PastRun, StagedRun, load_run, train
from tiny_run_file import tiny_run_file

pytestmark = pytest.mark.slow
FLEET = "[pipeline]\nstages = 4\nspares = 1\n\n[checkpoint]\nevery = 1\nkeep = 30\n\n"
LIAR = "[attack]\nkind = 'forward_sign_flip'\nstages = [1]\nfrom_step = 2\n"
OLD_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
TrainRun = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def quick_workers(fork_server: ForkedCommands) -> Iterator[None]:
    with forked_workers(fork_server):
        yield


@pytest.fixture
def train_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainRun:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))

    def run(text: str, *overrides: str) -> dict[str, Any]:
        (tmp_path / "run.toml").write_text(text)
        config = load_run(tmp_path / "run.toml", overrides)
        workers = {"open_workers": attackers_of(config.attack)} if isinstance(config, StagedRun) else {}
        return train(config, tmp_path / "run", console=Console(file=io.StringIO()), **workers)

    return run


class Stranger:
    """A process with a directory of its own, and no other file of the owner than the published ones."""

    def __init__(self, home: Path, published: Path) -> None:
        self.home, self.published = home, home / "published"
        home.mkdir()
        shutil.copytree(published, self.published)

    def reverify(self, *words: str, processor: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Return exit code and answer."""
        program = [sys.executable, "-m", "phalanx", "reverify", str(self.published), "--json", *words]
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        environment = {**kept, "HOME": str(self.home), "HF_HUB_OFFLINE": "1", **(processor or {})}
        done = subprocess.run(program, cwd=self.home, env=environment, capture_output=True, check=False)
        assert done.returncode in (0, 5, 7), done.stderr.decode()
        return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_stranger_recomputes_a_run_that_had_a_liar_and_finds_what_was_altered_afterwards(
    train_run: TrainRun, tmp_path: Path
) -> None:
    summary = train_run(tiny_run_file(FLEET + LIAR, steps=20, validate_every=10))
    assert (summary["status"], summary["evicted"]) == ("completed", ["worker-1"])
    stranger = Stranger(tmp_path / "stranger", publish(tmp_path / "run", tmp_path / "published"))
    shutil.rmtree(tmp_path / "published")

    code, answer = stranger.reverify("--share", "1/20", "--certificate", str(tmp_path / "run" / "owner.pem"))

    # whole segments are drawn: the first has three steps, since no state of steps 1 and 2 outlived the lie
    (segment,) = [result["segment"] for result in answer["results"]]
    assert (code, answer["verdict"], answer["ordered"]) == (0, "proved", 20)
    assert answer["recomputed"] == segment["end"] - segment["start"]
    assert answer["cost"]["cpu_seconds"] > 0
    assert answer["cost"]["bytes"] > 0
    # the step that the liar spoiled was done again by others
    assert stranger.reverify("--step", "2", "--out", "step")[0] == 0
    owner = LyingOwner(tmp_path / "run")
    owner.change_tensor(12, 2, "weight/")
    owner.sign_anew()
    other = Stranger(tmp_path / "other", publish(owner.home, tmp_path / "altered"))

    code, answer = other.reverify("--share", "1", "--out", "all")

    assert code == 5
    assert (answer["first_difference"]["step"], answer["first_difference"]["stage"]) == (11, 2)
    assert answer["recomputed"] == 18
    assert "refuted: step 11, stage 2" in answer["error"]["message"]


def test_lies_that_nobody_saw_are_found_by_a_stranger(
    train_run: TrainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coin falls on whole steps, so that made-up weight gradients pass; no owner has altered anything."""
    monkeypatch.setattr(AuditDraw, "draws_whole_step", lambda self, *, step, epoch, stage: False)
    unseen = "step_audit_rate = 0.0\nowner_audit_rate = 0.0\ngradient_screen = false\nkeep_states = 0\n"
    text = FLEET + f"[guard]\n{unseen}\n" + LIAR.replace("forward_sign_flip", "gradient_sign")
    summary = train_run(tiny_run_file(text, steps=5, validate_every=5))
    assert (summary["evicted"], summary["attacked_steps"][0]) == ([], 2)

    found = recompute(publish(tmp_path / "run", tmp_path / "published"), tmp_path, *range(5))

    assert found.verdict == "refuted"
    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.stage) == (2, 1)
    assert "weight gradient" in found.first_difference.fact
    assert [result.verdict for result in found.results] == ["proved", "proved", *["refuted"] * 3]


def test_exact_runs_are_recomputed_and_refuted_on_another_processor(train_run: TrainRun, tmp_path: Path) -> None:
    train_run(tiny_run_file("[pipeline]\nstages = 2\n\n[checkpoint]\nevery = 1\n", steps=3), "train.numerics='exact'")
    stranger = Stranger(tmp_path / "stranger", publish(tmp_path / "run", tmp_path / "published"))

    code, answer = stranger.reverify("--share", "1", processor=OLD_PROCESSOR)

    assert (code, answer["recomputed"]) == (0, 3)
    owner = LyingOwner(tmp_path / "run")
    owner.change_tensor(2, 1, "weight/")
    owner.sign_anew()
    other = Stranger(tmp_path / "other", publish(owner.home, tmp_path / "altered"))
    code, answer = other.reverify("--step", "1", processor=OLD_PROCESSOR)
    assert (code, answer["first_difference"]["step"]) == (5, 1)


def test_on_another_processor_other_bits_of_floats_decide_nothing(train_run: TrainRun, tmp_path: Path) -> None:
    train_run(tiny_run_file("[pipeline]\nstages = 2\n\n[checkpoint]\nevery = 1\n", steps=3))
    stranger = Stranger(tmp_path / "stranger", publish(tmp_path / "run", tmp_path / "published"))
    assert stranger.reverify("--share", "1", "--out", "here")[0] == 0

    code, answer = stranger.reverify("--share", "1", "--out", "there", processor=OLD_PROCESSOR)

    # a machine without vectors has the same bits here as there
    if code == 0:
        assert answer["recomputed"] == 3
        pytest.skip("this processor computes as one without vectors")
    assert (code, answer["verdict"]) == (7, "undecided")
    assert "this machine is of another numeric class" in answer["reasons"][0]
    assert "instructions DEFAULT" in answer["reasons"][0]


def test_states_of_a_data_set_are_bound_to_the_passport_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    data = write_dataset(tmp_path / "data", TEXTS)
    train(load_run(write_run_file(tmp_path / "run.toml", data, "best_fit", 5, 1)), tmp_path / "run")
    make_passport(PastRun(tmp_path / "run"), tmp_path / "first.passport", PassportChoice())
    path = publish(tmp_path / "run", tmp_path / "out", passport=tmp_path / "first.passport")
    # the owner's passport of another history of the same run
    owner = LyingOwner(tmp_path / "run")
    owner.sign_anew(change_leaf=change_clip)
    make_passport(PastRun(owner.home), tmp_path / "second.passport", PassportChoice())

    signed = open_publication(path / "run.passport")

    assert signed.manifest.passport == hashlib.sha256((tmp_path / "first.passport").read_bytes()).hexdigest()
    data.rename(tmp_path / "moved")
    assert recompute(path, tmp_path, 3).verdict == "proved"
    shutil.copyfile(tmp_path / "second.passport", path / "run.passport")
    sign_publication(path, owner)
    with pytest.raises(VerificationError, match="another passport than the manifest is bound to"):
        open_publication(path)
    sign_publication(path, owner, passport=hashlib.sha256((path / "run.passport").read_bytes()).hexdigest())
    with pytest.raises(VerificationError, match="another end of this one's log"):
        open_publication(path)
