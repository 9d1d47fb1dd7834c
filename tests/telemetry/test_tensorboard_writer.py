import importlib.util
import logging
import subprocess
import sys
import warnings

import numpy as np
import pytest

from phalanx.telemetry import Histogram, TensorBoardWriter

has_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the tensorboard extra is not installed"
)


@has_tensorboard
def test_scalars_can_be_read_back(tmp_path):
    with TensorBoardWriter(tmp_path / "tb") as writer:
        writer.add_scalar("loss", 2.5, 1)
        writer.add_scalars({"loss": 2.0, "lr": float("nan")}, 2)

    assert writer.note is None
    assert read_back(tmp_path / "tb") == [("loss", 1, 2.5), ("loss", 2, 2.0)]


@has_tensorboard
def test_closing_twice_and_writing_after_it_do_nothing(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.add_scalar("loss", 2.0, 1)
    writer.close()
    writer.close()

    writer.add_scalar("loss", 1.0, 2)

    assert read_back(tmp_path) == [("loss", 1, 2.0)]


def test_without_the_extra_it_says_so_in_one_line_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with caplog.at_level(logging.WARNING), TensorBoardWriter(tmp_path / "tb") as writer:
        writer.add_scalar("loss", 1.0, 1)

    assert caplog.messages == [writer.note]
    assert "phalanx-train[tensorboard]" in writer.note
    assert not (tmp_path / "tb").exists()


def test_a_directory_that_cannot_be_made_does_not_stop_the_run(tmp_path):
    (tmp_path / "tb").write_text("a file, not a directory")

    with TensorBoardWriter(tmp_path / "tb") as writer:
        writer.add_scalar("loss", 1.0, 1)

    assert writer.note is not None


def test_telemetry_loads_neither_torch_nor_tensorboard():
    code = "import sys, phalanx.telemetry; sys.exit(bool({'torch', 'tensorboard'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def values_of(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        (file,) = directory.iterdir()
        return [(event.step, value) for event in EventFileLoader(str(file)).Load() for value in event.summary.value]


def read_back(directory):
    return [
        (value.tag, step, value.tensor.float_val[0] if value.tensor.float_val else value.simple_value)
        for step, value in values_of(directory)
    ]


@has_tensorboard
def test_a_text_can_be_read_back_and_is_quoted(tmp_path):
    with TensorBoardWriter(tmp_path) as writer:
        writer.add_text("samples/0", "one\n<two>", 3)

    ((step, value),) = values_of(tmp_path)
    assert (step, value.tag, value.metadata.plugin_data.plugin_name) == (3, "samples/0", "text")
    assert value.tensor.string_val[0] == b"    one\n    <two>"


@has_tensorboard
def test_a_histogram_can_be_read_back_bin_by_bin(tmp_path):
    with TensorBoardWriter(tmp_path) as writer:
        writer.add_histograms([Histogram("gradients", "h.0.w", -1.0, 1.0, (3, 4))], 5)

    ((step, value),) = values_of(tmp_path)
    assert (step, value.tag) == (5, "gradients/h.0.w")
    # TensorBoard turns what it reads into a tensor: left end, right end and count of each bin
    bins = np.frombuffer(value.tensor.tensor_content, dtype=np.float32).reshape(-1, 3)
    assert bins[:, 2].sum() == 7.0
    assert (bins[0, 0], bins[-1, 1]) == (-1.0, 1.0)
