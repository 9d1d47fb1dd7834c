"""A reference that is computed in parts: a kill loses no finished part, and no altered part is believed."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.data.preferences import PairCorpus, PairRows
from phalanx.errors import CheckpointError
from phalanx.models import ModelSource, parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.train.batches import reference
from phalanx.train.batches.reference import ReferenceModel, ReferenceStore, reference_log_probs

LLAMA = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
TOKENS, PAIRS, HELD_OUT = 8, 20, 5
PART_BYTES = 2 * reference._ROWS_AT_ONCE * 4 * 16 * TOKENS
"""Sixteen rows a part: three of the pairs to train on, one of those held out."""
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_reference_parts import *
reference._HIDDEN_BYTES = PART_BYTES
kill = lambda done, of: done == 32 and os.kill(os.getpid(), signal.SIGKILL)
compute(Path(sys.argv[1]), Path(sys.argv[2]), kill)
"""


def pairs(seed=1):
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 31, (2 * n, TOKENS), generator=draw) for n in (PAIRS, HELD_OUT)]
    return PairCorpus(*(PairRows(ids, ids, {}) for ids in drawn), 31, 0, Path(), "")


def compute(home, model, told=lambda _done, _of: None, corpus=None):
    store = ReferenceStore(home / "reference.safetensors", must_exist=False, told=told)
    return reference_log_probs(store, corpus or pairs(), ReferenceModel(ModelSource(model), "sdpa", 0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(parse_hub_config(LLAMA, "tiny"), 3, tmp_path_factory.mktemp("model"), None)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(reference, "_HIDDEN_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory, model):
    """The directory of a process that was killed when two of four parts were stored; not to be changed."""
    home = tmp_path_factory.mktemp("killed")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(home), str(model)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert sorted(path.name for path in (home / "reference.parts").iterdir()) == [
        "train-0-16.safetensors",
        "train-16-32.safetensors",
    ]
    return home


@pytest.fixture
def killed(killed_once, tmp_path):
    """A copy of it."""
    return shutil.copytree(killed_once, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_a_kill_loses_no_finished_part_and_the_bits_are_those_of_one_pass(killed, model, tmp_path, monkeypatch):
    asked, told = [], []
    run = reference._log_probs
    monkeypatch.setattr(reference, "_log_probs", lambda *args: asked.append(args[2:]) or run(*args))

    found = compute(killed, model, lambda *done: told.append(done))

    assert asked == [(32, 40), (0, 10)]
    assert told == [(0, 50), (16, 50), (32, 50), (40, 50), (50, 50)]
    (tmp_path / "whole").mkdir()
    monkeypatch.setattr(reference, "_HIDDEN_BYTES", 1 << 29)
    whole = compute(tmp_path / "whole", model)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert not (killed / "reference.parts").exists()
    assert load_file(killed / "reference.safetensors")["train"].shape == (40,)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (flipped, r"train-16-32.safetensors: its numbers differ from those written"),
        (lambda path: path.write_bytes(b""), "train-16-32.safetensors: is not a reference file of this run"),
        (
            lambda path: save_file(load_file(path), path, {"made_of": "0" * 64}),
            "belongs to another model or to other pairs",
        ),
        (lambda path: path.write_bytes((path.parent / "train-0-16.safetensors").read_bytes()), "its numbers differ"),
    ],
    ids=["altered", "cut off", "foreign", "of other rows"],
)
def test_a_part_that_is_not_what_was_written_is_refused_by_name(killed, model, harm, told):
    harm(killed / "reference.parts/train-16-32.safetensors")

    with pytest.raises(CheckpointError, match=told):
        compute(killed, model)


def test_parts_of_other_pairs_are_refused(killed, model):
    with pytest.raises(CheckpointError, match="belongs to another model or to other pairs"):
        compute(killed, model, corpus=pairs(seed=2))


def test_a_finished_file_that_was_altered_is_refused_before_the_log_names_it(model, tmp_path):
    compute(tmp_path, model)
    flipped(tmp_path / "reference.safetensors")

    with pytest.raises(CheckpointError, match="its numbers differ from those written"):
        compute(tmp_path, model)
