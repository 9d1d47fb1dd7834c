"""A directory of the hub is looked at, made into one that can be trained, and compared with a run."""

import json
import os
import pickle

import pytest
import tokenizers
import torch
from tiny_models import some_ids, tiny_source, whole_model

from phalanx.cli import run_command as command_line
from phalanx.models import ModelSource
from phalanx.models.imported import _take_files
from phalanx.models.inspection import inspect_model
from phalanx.security.isolation import IsolatedProcess
from phalanx.train.entry import cannot_confine

LACKING = cannot_confine()
confined = pytest.mark.skipif(LACKING is not None, reason=f"no program can be confined here: {LACKING}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def pickled(cache, tmp_path):
    """An OPT as the hub has had it: a pickle, vocab.json and merges.txt."""
    source, directory = tiny_source("opt", cache), tmp_path / "opt-old"
    directory.mkdir()
    torch.save(whole_model(source).state_dict(), directory / "pytorch_model.bin")
    (directory / "config.json").write_text((source.directory / "config.json").read_text())
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    pieces.train_from_iterator(["low lower lowest"] * 9, trainer)
    pieces.model.save(str(directory))
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return source, directory


def said(capsys):
    return json.loads(capsys.readouterr().out)


def test_a_model_that_can_be_trained_is_described_and_nothing_is_refused(cache, tmp_path, capsys):
    source = tiny_source("llama", cache)
    (source.directory / "tokenizer.json").write_text("{}")

    assert command_line(["model", "inspect", str(source.directory), "--json"]) == 0

    found = said(capsys)
    assert (found["family"], found["layers"], found["heads"], found["heads of keys"]) == ("llama", 4, 4, 2)
    assert found["parameters"] == sum(value.numel() for value in whole_model(source).parameters())
    assert (found["weights"], found["tokenizer"], found["refused"]) == ("safetensors", "tokenizer.json", [])


def test_what_a_run_would_refuse_is_listed_with_the_command_that_helps(cache, pickled, tmp_path, capsys):
    _, directory = pickled
    (directory / "merges.txt").unlink()

    assert command_line(["model", "inspect", str(directory)]) == 0
    shown = capsys.readouterr().out

    assert "phalanx model convert" in shown
    assert "no tokenizer.json; phalanx model import makes one" in shown
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    (mixture / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert "a mixture of experts" in inspect_model(mixture)["refused"][0]


@confined
def test_a_pickled_model_becomes_one_that_computes_the_same(pickled, tmp_path, capsys):
    source, directory = pickled
    out = tmp_path / "opt"

    assert command_line(["model", "import", str(directory), str(out)]) == 0

    assert f'model.path = "{out}"' in capsys.readouterr().out
    ids = some_ids()
    made = ModelSource(out)
    assert torch.equal(whole_model(made).eval()(ids).logits, whole_model(source).eval()(ids).logits)
    assert made.tokenizer_path == out / "tokenizer.json"
    assert not list(out.glob("*.bin"))
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    assert inspect_model(out)["refused"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["opt", "opt-old"]
    assert command_line(["model", "import", str(directory), str(out)]) == 3


# one part is quick above
@pytest.mark.slow
@confined
def test_many_pickled_parts_become_as_many_of_safetensors(pickled, tmp_path):
    source, directory = pickled
    state = torch.load(directory / "pytorch_model.bin", weights_only=True)
    names = sorted(state)
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, directory / file)
    index = {name: file for file, held in parts.items() for name in held}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "pytorch_model.bin").unlink()

    assert command_line(["model", "convert", str(directory), str(tmp_path / "out")]) == 0

    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert not (tmp_path / "out/tokenizer.json").exists()
    ids = some_ids()
    made = ModelSource(tmp_path / "out")
    assert torch.equal(whole_model(made).eval()(ids).logits, whole_model(source).eval()(ids).logits)


class Command:
    """An object with a pickle that runs a command where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@confined
def test_a_pickle_that_runs_code_runs_none_and_is_refused(pickled, tmp_path, capsys):
    _, directory = pickled
    evil = tmp_path / "opt-old" / "was-here"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Command(evil)}))

    assert command_line(["model", "convert", str(directory), str(tmp_path / "out")]) == 3

    assert "cannot be converted" in capsys.readouterr().err
    assert not evil.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@confined
def test_weights_of_another_shape_than_the_config_s_are_refused(pickled, tmp_path, capsys):
    _, directory = pickled
    config = json.loads((directory / "config.json").read_text()) | {"ffn_dim": 64}
    (directory / "config.json").write_text(json.dumps(config))

    assert command_line(["model", "convert", str(directory), str(tmp_path / "out")]) == 3

    assert "fc1.weight' has shape [48, 32]; config.json says [64, 32]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_link_that_the_child_leaves_is_never_followed(pickled, tmp_path):
    made, target, secret = tmp_path / "made", tmp_path / "target", tmp_path / "secret"
    made.mkdir()
    target.mkdir()
    secret.write_text("key")
    (made / "refusal.txt").symlink_to(secret)

    with pytest.raises(Exception, match=r"left refusal\.txt, which is no plain file") as refused:
        _take_files(made, tmp_path, target, 3)

    assert "key" not in str(refused.value).replace("secret", "")


def test_a_directory_without_weights_starts_no_child(pickled, tmp_path, monkeypatch, capsys):
    _, directory = pickled
    (directory / "pytorch_model.bin").unlink()
    monkeypatch.setattr(IsolatedProcess, "__init__", None)

    assert command_line(["model", "import", str(directory), str(tmp_path / "out")]) == 3

    assert "has neither safetensors nor pytorch_model.bin" in capsys.readouterr().err


def no_copies_are_named(text, tmp_path):
    return ".unfinished-" not in text and ".reading-" not in text and str(tmp_path) in text


DAMAGES = {
    "another shape": {"ffn_dim": 64},
    "another vocabulary": {"vocab_size": 62},
    "more blocks": {"num_hidden_layers": 5},
}


@pytest.mark.parametrize(
    "damage",
    ["another shape", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES if name != "another shape")],
)
@pytest.mark.parametrize("kind", ["safetensors", pytest.param("pickled", marks=[confined, pytest.mark.slow])])
def test_an_error_of_an_import_names_the_user_s_file(cache, pickled, tmp_path, capsys, damage, kind):
    source, directory = pickled
    if kind == "safetensors":
        directory = tmp_path / "hub"
        directory.mkdir()
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_bytes((source.directory / name).read_bytes())
    config = json.loads((directory / "config.json").read_text()) | DAMAGES[damage]
    (directory / "config.json").write_text(json.dumps(config))

    assert command_line(["model", "import", str(directory), str(tmp_path / "out"), "--json"]) == 3

    error = json.dumps(said(capsys)["error"])
    assert no_copies_are_named(error, tmp_path)
    assert str(directory) in error
    if damage == "more blocks":
        assert ("pytorch_model.bin" if kind == "pickled" else "model.safetensors") in error


def test_an_error_about_an_index_names_the_user_s_index(cache, tmp_path, capsys):
    source, directory = tiny_source("opt", cache), tmp_path / "hub"
    directory.mkdir()
    (directory / "config.json").write_bytes((source.directory / "config.json").read_bytes())
    (directory / "part.safetensors").write_bytes((source.directory / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.decoder.embed_tokens.weight": "missing.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    assert command_line(["model", "import", str(directory), str(tmp_path / "out")]) == 3

    text = capsys.readouterr().err
    assert str(directory / "model.safetensors.index.json") in text
    assert no_copies_are_named(text, tmp_path)


@pytest.mark.slow
@confined
def test_an_error_of_a_tokenizer_that_is_made_names_the_user_s_directory(pickled, tmp_path, capsys):
    _, directory = pickled
    (directory / "vocab.json").write_text("[]")

    assert command_line(["model", "import", str(directory), str(tmp_path / "out")]) == 3

    text = capsys.readouterr().err
    assert str(directory) in text
    assert no_copies_are_named(text, tmp_path)
