"""Checkpoints of a run: beside the training, on a disk that refuses, encrypted, kept and rolled back."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from object_store import ACCESS, object_store
from phalanx.checkpoint import latest_checkpoint, open_checkpoint, open_key, write_new_key
from phalanx.checkpoint.kept_model import kept_files
from phalanx.errors import CheckpointError, ConfigError
from phalanx.security.crypto import load_identity
from phalanx.train.saving import savepoint
from phalanx.train.sessions import hooks
from phalanx.train.sessions.hooks import RunHooks


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def opened(run_dir, path=None, key=None):
    owner = load_identity(run_dir / "pki" / "owner").public
    return open_checkpoint(
        path or latest_checkpoint(run_dir / "checkpoints"), owner, run=None, config_digest=None, key=key
    )


def after_step(monkeypatch, num_steps, action):
    """Do something right before the checkpoint after so many steps."""
    save = RunHooks.save_if_due

    def act(self, at):
        if at == num_steps:
            action()
        save(self, at)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", act)


@pytest.fixture
def clean(trained_once):
    return trained_once[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_checkpoint_is_in_the_log_with_its_manifest_and_what_is_left(
    make_run, quietly, trained_once, tmp_path, asynchronous
):
    clean, home = trained_once
    if asynchronous:
        home = tmp_path / "run"
        summary = quietly(make_run("checkpoint.asynchronous=true"), home)
        assert summary["final_weights_digest"] == clean["final_weights_digest"]

    saved = events(home, "checkpoint_saved")
    assert [(body["step"], body["kept"]) for body in saved] == [(2, [2]), (4, [2, 4]), (6, [4, 6])]
    assert opened(home).step == 6


def test_what_is_written_beside_the_training_has_the_bits_of_its_own_step(
    make_run, quietly, trained_once, tmp_path, monkeypatch
):
    at_once, beside = trained_once[1], tmp_path / "beside"
    release, write = threading.Event(), savepoint.Savepoint.write_checkpoint

    def late(self, num_steps, *arguments, **options):
        if num_steps == 4:
            # the run is a step further by then
            assert release.wait(30)
        return write(self, num_steps, *arguments, **options)

    monkeypatch.setattr(savepoint.Savepoint, "write_checkpoint", late)
    after_step(monkeypatch, 5, release.set)
    quietly(make_run("checkpoint.asynchronous=true"), beside)

    left, right = (opened(home, home / "checkpoints" / "step-00000004", None) for home in (at_once, beside))
    assert left.stages_by_tensor() == right.stages_by_tensor()
    assert all(left.read_tensor(name).equal(right.read_tensor(name)) for name in left.stages_by_tensor())
    assert left.state["loader"] == right.state["loader"]
    assert left.state["totals"]["steps"] == right.state["totals"]["steps"] == 4


def test_a_run_that_is_stopped_while_a_checkpoint_is_written_finishes_it(
    make_run, quietly, clean, tmp_path, monkeypatch
):
    def stop():
        raise KeyboardInterrupt

    run = make_run("checkpoint.asynchronous=true")
    with monkeypatch.context() as patch:
        after_step(patch, 5, stop)
        quietly(run, tmp_path / "run")
    resumed = quietly(run, tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == clean["final_weights_digest"]


@contextlib.contextmanager
def largest_file(size_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_run_goes_on(
    make_run, quietly, clean, tmp_path, monkeypatch, asynchronous
):
    run = make_run(f"checkpoint.asynchronous={str(asynchronous).lower()}")
    seen, write = [], savepoint.Savepoint.write_checkpoint

    def refused(self, num_steps, *arguments, **options):
        if num_steps != 4:
            return write(self, num_steps, *arguments, **options)
        try:
            with largest_file(50_000):
                return write(self, num_steps, *arguments, **options)
        finally:
            seen.append(opened(tmp_path / "run").step)

    monkeypatch.setattr(savepoint.Savepoint, "write_checkpoint", refused)
    summary = quietly(run, tmp_path / "run")

    assert seen == [2]
    assert summary["status"] == "completed"
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    (failed,) = events(tmp_path / "run", "checkpoint_failed")
    assert failed["step"] == 4
    assert "File too large" in failed["reason"]
    assert "earlier checkpoints are untouched" in failed["reason"]
    assert "no checkpoint of step 4, training continues" in summary["shown"]
    assert opened(tmp_path / "run").step == 6


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of two MiB, where this process may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not done or done.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full_costs_one_checkpoint_and_nothing_else(
    make_run, quietly, clean, tmp_path, monkeypatch, small_disk
):
    def fill():
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "before")
        shutil.copytree(tmp_path / "before", small_disk / "checkpoints")
        (tmp_path / "run" / "checkpoints").symlink_to(small_disk / "checkpoints")
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free():
        assert opened(tmp_path / "run").step == 2
        (small_disk / "ballast").unlink()

    with monkeypatch.context() as patch:
        after_step(patch, 3, fill)
        after_step(patch, 5, free)
        summary = quietly(make_run("checkpoint.keep=1"), tmp_path / "run")

    (failed,) = events(tmp_path / "run", "checkpoint_failed")
    assert "No space left on device" in failed["reason"]
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert opened(tmp_path / "run").step == 6


@pytest.fixture
def public_directory(monkeypatch):
    """A directory and a cache that a user without privileges may use."""
    place = Path(tempfile.mkdtemp(prefix="phalanx-test-", dir="/tmp"))
    place.chmod(0o777)
    monkeypatch.setenv("PHALANX_CACHE", str(place / "cache"))
    yield place
    shutil.rmtree(place)


@contextlib.contextmanager
def without_privileges():
    """A superuser may write anywhere: this process has another user's rights meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_may_not_be_written_costs_one_checkpoint_and_nothing_else(
    make_run, quietly, clean, public_directory, monkeypatch
):
    run, checkpoints = make_run(), public_directory / "run" / "checkpoints"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(public_directory / "config"))

    with monkeypatch.context() as patch, without_privileges():
        after_step(patch, 3, lambda: checkpoints.chmod(0o555))
        after_step(patch, 5, lambda: checkpoints.chmod(0o755))
        summary = quietly(run, public_directory / "run")

    (failed,) = events(public_directory / "run", "checkpoint_failed")
    assert (failed["step"], "Permission denied" in failed["reason"]) == (4, True)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000006"]


def test_the_last_checkpoint_is_the_result_and_without_it_the_run_has_failed(
    make_run, quietly, clean, tmp_path, monkeypatch
):
    limits = contextlib.ExitStack()
    with limits, monkeypatch.context() as patch:
        after_step(patch, 6, lambda: limits.enter_context(largest_file(50_000)))
        with pytest.raises(CheckpointError, match="step 6 cannot be saved"):
            quietly(make_run(), tmp_path / "run")

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    resumed = quietly(make_run(), tmp_path / "run", resume=True)
    assert (resumed["resumed_from"], resumed["final_weights_digest"]) == (4, clean["final_weights_digest"])


def test_certain_steps_are_kept_for_good(make_run, quietly, tmp_path):
    quietly(make_run("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=3"), tmp_path / "run")

    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006"]


def test_an_encrypted_run_is_resumed_with_its_key_only_and_nothing_tells_the_key(
    make_run, quietly, clean, tmp_path, monkeypatch
):
    def stop():
        raise KeyboardInterrupt

    key = tmp_path / "checkpoint.key"
    write_new_key(key)
    run = make_run("checkpoint.encrypt=true", f"checkpoint.key='file:{key}'")
    with monkeypatch.context() as patch:
        after_step(patch, 5, stop)
        quietly(run, tmp_path / "run")
    secret = key.read_text().strip()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
            assert bytes.fromhex(secret) not in path.read_bytes()
    assert opened(tmp_path / "run", key=open_key(f"file:{key}")).step == 4
    key.rename(tmp_path / "moved.key")
    with pytest.raises(CheckpointError, match=r"checkpoint\.key: .*No such file"):
        quietly(run, tmp_path / "run", resume=True)
    (tmp_path / "moved.key").rename(key)

    resumed = quietly(run, tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == clean["final_weights_digest"]


@pytest.fixture
def interrupted_without_its_disk(make_run, quietly, tmp_path, monkeypatch):
    """A run that copied its checkpoints to ``far``, was stopped after step 5, and lost its own."""

    def stop():
        raise KeyboardInterrupt

    run = make_run(f"checkpoint.remote='file://{tmp_path}/far'")
    with monkeypatch.context() as patch:
        after_step(patch, 5, stop)
        quietly(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    return run


def test_a_run_whose_disk_is_gone_goes_on_from_the_remote_store(interrupted_without_its_disk, quietly, clean, tmp_path):
    run, kept = interrupted_without_its_disk, tmp_path / "run" / "kept_model"
    before = kept_files(tmp_path / "run")
    shutil.rmtree(kept)

    resumed = quietly(run, tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == clean["final_weights_digest"]
    assert kept_files(tmp_path / "run") == before != {}
    (folder,) = (tmp_path / "far").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["kept_model", "step-00000004", "step-00000006"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes() + b" "), r"kept_model/config\.json: altered: found SHA-256"),
        pytest.param(
            lambda file: file.unlink(), r"cannot bring kept_model/config\.json: it is not there", marks=pytest.mark.slow
        ),
    ],
    ids=["altered", "missing"],
)
def test_a_kept_model_of_the_remote_store_that_no_checkpoint_signed_is_not_brought(
    interrupted_without_its_disk, quietly, tmp_path, harm, reason
):
    shutil.rmtree(tmp_path / "run" / "kept_model")
    (folder,) = (tmp_path / "far").iterdir()
    harm(folder / "kept_model" / "config.json")

    with pytest.raises(CheckpointError, match=reason):
        quietly(interrupted_without_its_disk, tmp_path / "run", resume=True)

    assert not (tmp_path / "run" / "kept_model").exists()


def test_a_remote_store_that_went_back_in_time_is_found_out(interrupted_without_its_disk, quietly, tmp_path):
    run = interrupted_without_its_disk
    (folder,) = (tmp_path / "far").iterdir()
    shutil.rmtree(folder / "step-00000004")
    shutil.copytree(folder / "step-00000002", folder / "step-00000004")

    with pytest.raises(CheckpointError, match=r"step-00000004: swapped: it is of step 2"):
        quietly(run, tmp_path / "run", resume=True)


def test_a_remote_store_that_refuses_is_said_and_the_run_goes_on(make_run, quietly, clean, tmp_path):
    (tmp_path / "far").write_text("a file where a folder should be")

    summary = quietly(make_run(f"checkpoint.remote='file://{tmp_path}/far'"), tmp_path / "run")

    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert [body["step"] for body in events(tmp_path / "run", "checkpoint_not_copied")] == [2, 4, 6]
    assert "the checkpoint of step 2 exists on this disk only" in summary["shown"]


# stores of objects have quick tests in tests/checkpoint
@pytest.mark.slow
# the asynchronous client leaves its connections to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_run_writes_to_an_object_store_beside_the_training_and_goes_on_from_there(
    make_run, quietly, clean, tmp_path, monkeypatch
):
    for package in ("s3fs", "moto", "flask"):
        pytest.importorskip(package)
    import fsspec

    def stop():
        raise KeyboardInterrupt

    run = make_run("checkpoint.asynchronous=true", "checkpoint.remote='s3://the-bucket/runs'")
    with object_store() as address:
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("the-bucket")
        with monkeypatch.context() as patch:
            after_step(patch, 5, stop)
            quietly(run, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")

        resumed = quietly(run, tmp_path / "run", resume=True)

    fsspec.filesystem("s3").clear_instance_cache()
    assert events(tmp_path / "run", "checkpoint_not_copied") == []
    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == clean["final_weights_digest"]
    for path in (tmp_path / "run").rglob("*.jsonl"):
        assert ACCESS["AWS_SECRET_ACCESS_KEY"] not in path.read_text()


def test_from_step_without_resume_is_a_mistake(make_run, quietly, tmp_path):
    with pytest.raises(ConfigError, match="add --resume"):
        quietly(make_run(), tmp_path / "run", from_step=2)
