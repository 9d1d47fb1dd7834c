"""What a machine lacks is said before any process starts, and a rank's folder is its own and is gone afterwards."""

import os
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import ConfigError
from phalanx.parallel.deepspeed import DeepSpeedConfig, check_machine, disk, extra
from phalanx.parallel.deepspeed.disk import file_system, own_folder, why_no_disk, why_no_locked_memory

DIGEST = "ab" * 32


@pytest.fixture
def installed(monkeypatch):
    def install(found):
        def version(name):
            if found is None:
                raise PackageNotFoundError(name)
            return found

        monkeypatch.setattr(extra, "version", version)

    return install


def check(config=None, **options):
    check_machine(config or DeepSpeedConfig(), [1000], 2, 2, "cpu", build=False, **options)


def test_a_machine_without_the_extra_is_told_how_to_install_it(installed):
    installed(None)

    with pytest.raises(ConfigError, match=r'not installed; pip install "phalanx-train\[deepspeed\]"'):
        check()


@pytest.mark.parametrize(("found", "works"), [("0.19.8", True), ("0.19.12+cu128", True), ("0.19.7", False)])
def test_only_versions_that_this_was_written_for_are_taken(installed, found, works):
    installed(found)

    assert (extra.why_no_extra() is None) == works


@pytest.mark.parametrize("found", ["0.20.0", "1.0", "0.9", "odd"])
def test_other_versions_are_named(installed, found):
    installed(found)

    with pytest.raises(ConfigError, match=f"deepspeed {found} is installed.*0.19.8 and later below 0.20"):
        check()


def on_disk(directory):
    return DeepSpeedConfig(offload_optimizer="nvme", directory=str(directory))


def test_a_directory_that_is_not_mounted_is_not_made(installed, tmp_path):
    installed("0.19.8")

    with pytest.raises(ConfigError, match=r"directory: .*is no directory; mount the disk"):
        check(on_disk(tmp_path / "nvme"))

    assert not (tmp_path / "nvme").exists()


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    said = why_no_disk(tmp_path, 2**60)

    assert said is not None
    assert "GiB left and the ranks of this machine keep 1073741824.0 GiB" in said


def test_memory_that_looks_like_a_disk_is_refused(tmp_path, monkeypatch):
    mounts = [("/", "xfs"), ("/", "ext4"), (str(tmp_path.resolve()), "tmpfs")]
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(disk.psutil, "disk_partitions", lambda *, all: partitions)

    assert file_system(Path("/usr")) == "ext4"
    assert "is on tmpfs, which is the host's memory" in str(why_no_disk(tmp_path, 0))


def test_a_directory_without_direct_files_is_refused(tmp_path, monkeypatch):
    def refuse(path, flags, mode=0o777):
        raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(disk.os, "open", refuse)

    assert "(O_DIRECT) are refused (Invalid argument)" in str(why_no_disk(tmp_path, 0))


def test_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "access", lambda *_: False)

    assert "cannot be written" in str(why_no_disk(tmp_path, 0))


@pytest.mark.parametrize(("privileged", "words"), [(True, "None"), (False, "locks 64 MiB.*may lock 8 MiB.*ulimit -l")])
def test_memory_that_may_not_be_locked_is_said(monkeypatch, privileged, words):
    monkeypatch.setattr(disk.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(disk, "_can_lock", lambda size: privileged)

    assert re.search(words, str(why_no_locked_memory(64 * 2**20)))
    assert why_no_locked_memory(8 * 2**20) is None


def test_a_page_can_be_locked():
    assert disk._can_lock(4096) in (True, False)


def test_a_folder_is_private_and_gone_afterwards(tmp_path):
    with own_folder(tmp_path, DIGEST, 1) as folder:
        (folder / "zero_stage_3").mkdir()
        (folder / "zero_stage_3" / "1_param.tensor.swp").write_bytes(b"weights")
        assert folder.stat().st_mode & 0o777 == 0o700

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_rank_left_is_removed_before_it_begins_again(tmp_path):
    old = tmp_path / f"phalanx-{DIGEST[:16]}-rank-0"
    (old / "zero_stage_3").mkdir(parents=True)
    (old / "zero_stage_3" / "old.swp").write_bytes(b"weights")
    (old / "stray").write_bytes(b"weights")

    with own_folder(tmp_path, DIGEST, 0) as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_two_runs_of_one_file_do_not_share_a_folder(tmp_path):
    with own_folder(tmp_path, DIGEST, 0) as folder:
        (folder / "mine").touch()
        with pytest.raises(ConfigError, match="in use by another process"), own_folder(tmp_path, DIGEST, 0):
            pass
        assert (folder / "mine").exists()
        with own_folder(tmp_path, DIGEST, 1), own_folder(tmp_path, "cd" * 32, 0):
            assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be made"), own_folder(tmp_path / "gone", DIGEST, 0):
        pass


def test_what_deepspeed_reads_from_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    before = dict(os.environ)

    with extra.deepspeed_environment("cuda:1", 3):
        assert (os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"]) == ("cuda", "3")
        # a process that finds a rank there would take itself for one
        assert "RANK" not in os.environ

    assert dict(os.environ) == before


def test_what_lies_behind_a_planted_link_is_not_emptied(tmp_path):
    with own_folder(tmp_path, DIGEST, 0) as folder:
        name = folder.name
    target = tmp_path / "home"
    target.mkdir()
    (target / "letters").write_text("kept", encoding="utf-8")
    (tmp_path / name).symlink_to(target)

    with pytest.raises(ConfigError, match="is a link"), own_folder(tmp_path, DIGEST, 0):
        pass

    assert (target / "letters").read_text(encoding="utf-8") == "kept"
