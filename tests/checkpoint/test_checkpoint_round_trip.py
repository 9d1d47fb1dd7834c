import errno
import gc
import resource
import subprocess
import sys
import weakref

import pytest
import torch
from made_shards import STATE, make_shard
from pydantic import ValidationError

from phalanx.checkpoint import CheckpointConfig, Retention, Shard, latest_checkpoint, open_checkpoint, save_checkpoint
from phalanx.checkpoint import save as save_module
from phalanx.errors import CheckpointError


def opened(path, owner, **expected):
    return open_checkpoint(path, owner.public, **{"run": "demo", "config_digest": "ab" * 32, **expected})


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a).equal(bits(b))


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(save, owner):
    path = save(50)

    checkpoint = opened(path, owner)

    assert path.name == "step-00000050"
    assert names(path) == ["manifest.json", *(f"stage-{i}.safetensors" for i in range(3)), "state.json"]
    assert (checkpoint.step, checkpoint.stages, checkpoint.state) == (50, (0, 1, 2), STATE)
    for stage in range(3):
        expected = make_shard(stage, 50)
        loaded = checkpoint.read_shard(stage)
        assert loaded.num_steps == 50
        assert loaded.tensors.keys() == expected.tensors.keys()
        assert all(same_bits(loaded.tensors[name], expected.tensors[name]) for name in expected.tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), float("-inf"), -0.0, 1e-42]).to(torch.bfloat16),
        torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12, dtype=torch.int64).reshape(3, 4).t(),
        torch.arange(12.0)[2:5],
        torch.ones(3, requires_grad=True),
    ],
    ids=["bf16-specials", "nan-payload", "scalar", "empty", "transposed", "view", "needs-grad"],
)
def test_any_tensor_keeps_its_bits(tmp_path, owner, tensor):
    shard = Shard(0, {"weight/a": tensor, "weight/tied": tensor}, num_steps=1)

    path = save_checkpoint(tmp_path, 1, [shard], STATE, sign=owner, retention=Retention(1))

    loaded = opened(path, owner).stage_tensors(0)
    assert same_bits(loaded["weight/a"], tensor.detach())
    assert same_bits(loaded["weight/tied"], tensor.detach())


def test_only_one_stage_is_in_memory_at_a_time(tmp_path, owner):
    alive = []

    def stages():
        for stage in range(4):
            gc.collect()
            assert not any(reference() for reference in alive)
            shard = make_shard(stage)
            alive.append(weakref.ref(shard))
            yield shard
            del shard

    save_checkpoint(tmp_path, 1, stages(), STATE, sign=owner, retention=Retention(1))

    assert len(alive) == 4


def test_a_tensor_is_found_whichever_stage_holds_it(save, owner):
    checkpoint = opened(save(3), owner)

    tensor = checkpoint.read_tensor("weight/layers.2.w")

    assert same_bits(tensor, make_shard(2, 3).tensors["weight/layers.2.w"])
    assert checkpoint.stages_by_tensor()["exp_avg/layers.1.w"] == 1
    with pytest.raises(CheckpointError, match="no stage holds 'weight/unknown'"):
        checkpoint.read_tensor("weight/unknown")
    with pytest.raises(CheckpointError, match=r"has no stage 9; stages: \[0, 1, 2\]"):
        checkpoint.stage_tensors(9)


def test_the_newest_is_found_and_old_ones_are_pruned(save, tmp_path):
    for step in (0, 10, 20, 100):
        save(step, keep=2)

    assert names(tmp_path) == ["step-00000020", "step-00000100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000100"


def test_there_is_no_latest_where_there_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("not a checkpoint")

    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_a_run_that_went_back_leaves_no_later_step_behind(save, tmp_path):
    save(10)
    save(20)

    save(15)

    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_the_same_step_is_replaced(save, tmp_path, owner):
    save(10, stages=3)

    path = save(10, stages=2)

    assert opened(path, owner).stages == (0, 1)
    assert names(tmp_path) == ["step-00000010"]


def test_a_crash_between_the_two_renames_of_a_replacement_is_undone(save, tmp_path, owner):
    save(10).rename(tmp_path / "step-00000010.replaced")

    assert opened(latest_checkpoint(tmp_path), owner).step == 10


def test_such_a_crash_and_then_a_save_that_fails_leave_the_old_one(save, tmp_path, owner):
    save(10).rename(tmp_path / "step-00000010.replaced")

    with pytest.raises(InterruptedRun):
        save_checkpoint(tmp_path, 11, fails_at_once(), STATE, sign=owner, retention=Retention(1))

    assert opened(latest_checkpoint(tmp_path), owner).step == 10


def fails_at_once():
    raise InterruptedRun
    yield


def test_what_a_crash_left_behind_goes_with_the_next_save(save, tmp_path):
    for name in (".writing-abc", ".removing-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage-0.safetensors").write_bytes(b"half")

    save(1)

    assert names(tmp_path) == ["step-00000001"]


def test_a_disk_that_is_full_leaves_the_last_good_one(save, tmp_path, owner):
    save(1, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 cannot be saved .*File too large"):
            save(2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert names(tmp_path) == ["step-00000001"]
    assert opened(latest_checkpoint(tmp_path), owner).step == 1


def test_a_place_that_cannot_be_written_is_refused(save, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match="cannot be saved"):
        save(1, directory=tmp_path / "file")


def test_a_failure_of_the_source_passes_through_and_leaves_nothing(tmp_path, owner):
    def stages():
        yield make_shard(0)
        raise InterruptedRun

    with pytest.raises(InterruptedRun):
        save_checkpoint(tmp_path, 1, stages(), STATE, sign=owner, retention=Retention(1))

    assert names(tmp_path) == []


class InterruptedRun(Exception):  # noqa: N818 - what a user's own iterator may raise
    """Stands for anything that goes wrong while a stage is fetched."""


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(save, monkeypatch, caplog):
    save(1)
    real = save_module.shutil.rmtree

    def refuse(path, ignore_errors=False):
        if path.name.startswith(".removing"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(save_module.shutil, "rmtree", refuse)

    assert save(2, keep=1).is_dir()
    assert "an old checkpoint cannot be removed (Permission denied)" in caplog.text


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"run": "demo"}, "config_digest is None"),
        ({**STATE, "run": 3}, "run is 3"),
        ({**STATE, "rng": b"\x00"}, "is not JSON data"),
        ({**STATE, "loss": float("nan")}, "is not JSON data"),
    ],
)
def test_state_that_is_not_json_is_refused_by_name(save, tmp_path, state, found):
    with pytest.raises(CheckpointError, match=f"state.json: .*{found}"):
        save(1, state=state)

    assert names(tmp_path) == []


def test_two_shards_of_one_stage_are_refused(tmp_path, owner):
    with pytest.raises(CheckpointError, match=r"stage-1.safetensors: stage 1 is negative or was given twice"):
        save_checkpoint(tmp_path, 1, [make_shard(1), make_shard(1)], STATE, sign=owner, retention=Retention(1))


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (0, 0)])
def test_impossible_numbers_are_refused(save, step, keep):
    with pytest.raises(CheckpointError, match="expected step >= 0 and keep >= 1"):
        save(step, keep=keep)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"encrypt": True}, "belong together"),
        ({"key": "file:a.key"}, "belong together"),
        ({"encrypt": True, "key": "ab" * 32}, "never the key itself"),
        ({"remote": "bucket/folder"}, "expected an address"),
        ({"remote": "s3://key:secret@bucket/folder"}, "without credentials"),
        ({"remote": "s3://bucket/folder?token=1"}, "without credentials"),
    ],
)
def test_a_section_that_would_not_protect_or_would_tell_a_secret_is_refused(values, said):
    with pytest.raises(ValidationError, match=said):
        CheckpointConfig.model_validate(values)


@pytest.mark.parametrize("values", [{"every": -1}, {"keep": 0}, {"compress": True}])
def test_other_mistakes_in_the_section_are_refused(values):
    with pytest.raises(ValidationError):
        CheckpointConfig.model_validate(values)


def test_reading_the_config_class_loads_no_torch():
    code = "import sys; from phalanx.checkpoint import CheckpointConfig; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
