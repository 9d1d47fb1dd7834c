"""The section [deepspeed]: what it says, what it cannot be combined with, and what deepspeed is told."""

import pytest
from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig, RankRecipe
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.parallel.deepspeed.config import AioConfig
from phalanx.parallel.deepspeed.settings import deepspeed_settings, locked_bytes
from phalanx.train import load_run

RUN = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 16
n_embd = 32
n_layer = 2
n_head = 4

[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 300 }
sequence_length = 16

[train]
steps = 4
batch_size = 8
microbatches = 4

[optimizer]
lr = 1e-2
"""
DISK = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "directory": "/disk"}


@pytest.fixture
def make_run(tmp_path):
    def make(section, *overrides):
        path = tmp_path / "run.toml"
        path.write_text(RUN + section)
        return load_run(path, overrides)

    return make


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero": 2, "offload_parameters": "cpu", "offload_optimizer": "cpu"}, "offload_parameters.*needs zero = 3"),
        ({"offload_parameters": "cpu"}, "set offload_optimizer to"),
        ({"zero": 2, "offload_optimizer": "nvme", "directory": "/disk"}, "without a word.*set zero to 3"),
        ({"offload_optimizer": "nvme"}, '"nvme" needs directory'),
        ({"offload_optimizer": "cpu", "directory": "/disk"}, 'directory has no meaning without "nvme"'),
        ({"aio": AioConfig(queue_depth=32)}, 'aio has no meaning without "nvme"'),
        ({"zero": 0}, "zero"),
        ({**DISK, "aio": {"block_bytes": 5000}}, "multiple of 4096"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        DeepSpeedConfig(**keys)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ("[deepspeed]\n", r"needs the ranks of \[parallel\]; add \[parallel\]"),
        ("[parallel]\ndp = 2\ntp = 2\n[deepspeed]\n", "parallel.tp = 2: its ranks are data-parallel copies only"),
        ("[parallel]\npp = 2\n[deepspeed]\n", "parallel.pp = 2"),
        ("[parallel]\ncp = 2\n[deepspeed]\n", "parallel.cp = 2"),
        (
            "[parallel]\ndp = 2\nzero = 3\n[deepspeed]\n",
            "parallel.zero = 3: deepspeed.zero configures the sharding; remove it",
        ),
        ("[parallel]\ndp = 2\ngradient_compression = 'fp16'\n[deepspeed]\n", "gradient_compression"),
        ("[parallel]\ndp = 2\n[parallel.outer]\nevery = 2\n[deepspeed]\n", "parallel.outer"),
        ("[parallel]\ndp = 2\ncompile = true\n[deepspeed]\n", "parallel.compile"),
        ("[parallel]\n[deepspeed]\n[guard]\naudit_rate = 1.0\n", "exclude each other"),
        ("[parallel]\n[deepspeed]\n[checkpoint]\nasynchronous = true\n", "excludes checkpoint.asynchronous"),
        ("[parallel]\n[deepspeed]\noffload = 'cpu'\n", "unknown key"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(make_run, sections, words):
    with pytest.raises(ConfigError, match=words):
        make_run(sections)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.kind=sgd", 'supports adamw only; set it to "adamw"'),
        ("train.precision=fp16", 'set it to "bf16" or "fp32"'),
    ],
)
def test_what_deepspeed_has_not_here_is_refused(make_run, override, words):
    with pytest.raises(ConfigError, match=words):
        make_run("[parallel]\ndp = 2\n[deepspeed]\n", override)


def test_a_run_without_the_section_has_the_digest_that_it_had(make_run):
    plain = make_run("[parallel]\ndp = 2\n").model_dump()
    shared = make_run("[parallel]\ndp = 2\n[deepspeed]\n").model_dump()

    assert "deepspeed" not in plain
    assert shared.pop("deepspeed") == DeepSpeedConfig().model_dump()
    assert shared == plain


def recipe(dp=2, **optimizer):
    return RankRecipe(ParallelConfig(dp=dp), OptimizerConfig(lr=1e-3, **optimizer), 16, 4, 32, 10)


def test_deepspeed_is_told_what_the_run_file_says(tmp_path):
    config = DeepSpeedConfig(**DISK, update_at_once=5000, aio=AioConfig(queue_depth=32, threads=2))

    said = deepspeed_settings(config, recipe(clip_norm=0.5), 1001, tmp_path)

    assert said["train_micro_batch_size_per_gpu"] == 2
    assert (said["gradient_accumulation_steps"], said["gradient_clipping"]) == (4, 0.5)
    assert (said["aio"]["queue_depth"], said["aio"]["intra_op_parallelism"]) == (32, 2)
    zero = said["zero_optimization"]
    assert (zero["stage"], zero["sub_group_size"]) == (3, 5000)
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}
    # the larger of two uneven shares fits, and nothing stays in memory for being among the first
    assert zero["offload_param"]["buffer_size"] == 501
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_max_reuse_distance"]) == (0, 0)


def test_without_offload_and_clipping_deepspeed_is_told_of_none():
    said = deepspeed_settings(DeepSpeedConfig(zero=1), recipe(clip_norm=None), 1000, None)

    assert said["gradient_clipping"] == 0.0
    assert said["zero_optimization"].keys() == {"stage", "sub_group_size"}


def test_no_more_memory_is_locked_than_what_is_updated_at_once():
    few, many = (DeepSpeedConfig(**DISK, update_at_once=n) for n in (10_000, 10**6))

    # five buffers for layers; four for the update, of a group that may go beyond its size by one share
    assert locked_bytes(few, 10**6, 20_000, 2) == 4 * (5 * 10_000 + 4 * 20_000)
    assert locked_bytes(many, 10**6, 20_000, 2) == 4 * (5 * 10_000 + 4 * 500_000)
    assert locked_bytes(DeepSpeedConfig(offload_optimizer="cpu"), 10**6, 20_000, 2) == 0
