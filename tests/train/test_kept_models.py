"""A run directory keeps what an export needs beside its checkpoints, and a checkpoint signs every byte of that."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from phalanx.cli import run_command as command_line
from phalanx.data.tokenizers import ByteBpeTraining, train_tokenizer
from phalanx.errors import CheckpointError
from phalanx.train import train

TEXT = "the stage checks the next stage, and the next one checks it. "


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(words, capfd):
    code = command_line([*map(str, words), "--json"])
    return code, json.loads(capfd.readouterr().out.splitlines()[-1])["error"]


@pytest.fixture
def at_home(make_run, quietly, tmp_path, monkeypatch):
    """Return a function that trains on a text of its own beside the run file, with a tokenizer and chat template."""

    def train_at_home(*overrides: str) -> Path:
        home = tmp_path / "home"
        home.mkdir()
        # the cache is the run's own, so that it stays behind as well
        monkeypatch.delenv("PHALANX_CACHE")
        lines = (json.dumps({"text": f"{number}: {TEXT * 3}"}) for number in range(40))
        (home / "text.jsonl").write_text("\n".join(lines))
        (home / "tokenizer.json").write_bytes(train_tokenizer([TEXT * 20], ByteBpeTraining(vocab_size=262)).to_json())
        (home / "chat_template.jinja").write_text("{{ messages[0].content }}")
        monkeypatch.chdir(home)
        sources = "data.sources=[{kind='jsonl', path='text.jsonl'}]"
        tokenizer = "data.tokenizer={kind='file', path='tokenizer.json'}"
        run = make_run(sources, tokenizer, "train.validate_every=0", "train.steps=2", *overrides)
        quietly(run, home / "runs" / "first")
        return home

    return train_at_home


def test_a_run_that_was_moved_is_exported_and_goes_on_with_a_text_without_its_data(
    at_home, tmp_path, monkeypatch, capfd
):
    home = at_home()
    assert command_line(["checkpoint", "export", "runs/first", str(tmp_path / "there")]) == 0
    shutil.move(home / "runs" / "first", tmp_path / "moved")
    shutil.rmtree(home)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()

    exported = command_line(["checkpoint", "export", "moved", "out"])
    written = command_line(["generate", "moved", "--prompt", "the stage", "--max-new-tokens", "3", "--json"])

    assert (exported, written) == (0, 0)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "there")
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= set(files_of(tmp_path / "out"))


def test_an_adapter_is_exported_with_the_kept_tokenizer_and_only_beside_its_own_model(at_home, tmp_path, capfd):
    adapter = "model.adapter={kind='lora', rank=2}"
    home = at_home(adapter)
    (home / "text.jsonl").unlink()
    (home / "tokenizer.json").unlink()

    merged = command_line(["checkpoint", "export", "runs/first", "out", "--merge"])
    (weights,) = (home / "runs" / ".cache" / "models").glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    code, error = refused(["checkpoint", "export", "runs/first", "other", "--merge"], capfd)

    assert merged == 0
    assert (code, error["code"], error["key"]) == (3, "PHX-I053", "model")
    assert not (home / "other").exists()


@pytest.mark.parametrize("adapter", ["{kind='lora', rank=2}", "{kind='ptuning', tokens=2}"])
def test_an_exported_adapter_is_compared_with_the_end_of_its_run(at_home, monkeypatch, tmp_path, adapter):
    home = at_home(f"model.adapter={adapter}", "model.architecture.n_positions=32")
    monkeypatch.setenv("PHALANX_KEY", str(tmp_path / "signer.key"))
    assert command_line(["checkpoint", "export", "runs/first", "out"]) == 0
    assert command_line(["model", "verify", "out", "runs/first"]) == 0
    # 7: the passport holds, and says what it lacks
    assert command_line(["passport", "runs/first", "--model", "out", "--out", "first.passport"]) == 7
    assert command_line(["verify", "first.passport", "--model", "out"]) == 7

    described = home / "out" / "adapter_config.json"
    config = described.read_text()
    key = "lora_alpha" if "lora" in adapter else "num_virtual_tokens"
    described.write_text(json.dumps(json.loads(config) | {key: -3}))
    assert command_line(["model", "verify", "out", "runs/first"]) == 5
    described.write_text(json.dumps(json.loads(config) | {"rank_pattern": {}}))
    assert command_line(["model", "verify", "out", "runs/first"]) == 5
    described.write_text(config)

    file = home / "out" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1e-6}, file)

    assert command_line(["model", "verify", "out", "runs/first"]) == 5
    assert command_line(["passport", "runs/first", "--model", "out", "--out", "other.passport"]) == 5
    save_file(tensors | {f"{name}.more": tensors[name].clone()}, file)
    assert command_line(["model", "verify", "out", "runs/first"]) == 5


def change_key(home: Path, name: str, key: str, value: object) -> None:
    file = home / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


@pytest.mark.parametrize("adapter", ["", "model.adapter={kind='lora', rank=2}"])
def test_the_weights_of_a_run_beside_another_config_or_tokenizer_are_another_model(at_home, adapter, capfd):
    home = at_home(*filter(None, [adapter]))
    assert command_line(["checkpoint", "export", "runs/first", "out"]) == 0
    config, key = ("adapter_config.json", "lora_alpha") if adapter else ("config.json", "layer_norm_epsilon")
    (home / "out" / "README.md").write_text("Our model.")
    shutil.copytree(home / "out", home / "spread")
    change_key(home / "spread", "tokenizer_config.json", "eos_token", "<|endoftext|>")
    assert command_line(["model", "verify", "out", "runs/first"]) == 0
    assert command_line(["model", "verify", "spread", "runs/first"]) == 0

    swaps = {
        config: lambda out: change_key(out, config, key, 0.5),
        "tokenizer.json": lambda out: (out / "tokenizer.json").write_bytes(
            train_tokenizer(["other words " * 20], ByteBpeTraining(vocab_size=262)).to_json()
        ),
        "chat_template.jinja": lambda out: (out / "chat_template.jinja").write_text("obey me"),
        "tokenizer_config.json": lambda out: (out / "tokenizer_config.json").unlink(),
        "added_tokens.json": lambda out: (out / "added_tokens.json").write_text('{"the": 3}'),
        "additional_chat_templates/default.jinja": lambda out: (
            (out / "additional_chat_templates").mkdir(),
            (out / "additional_chat_templates" / "default.jinja").write_text("obey me"),
        ),
    }
    for name, swap in swaps.items():
        swapped = Path(shutil.copytree(home / "out", home / f"swapped-{Path(name).stem}-{Path(name).suffix[1:]}"))
        swap(swapped)
        capfd.readouterr()
        assert command_line(["model", "verify", swapped.name, "runs/first"]) == 5, name
        assert f"{swapped.name}/{name}: " in capfd.readouterr().err
        assert command_line(["passport", "runs/first", "--model", swapped.name, "--out", "forged.passport"]) == 5, name


@pytest.mark.parametrize("harm", ["changed", "removed", "added"])
def test_kept_files_that_the_checkpoint_has_not_signed_are_refused(at_home, make_run, capfd, harm):
    home = at_home()
    kept = home / "runs" / "first" / "kept_model"
    name = {"changed": "tokenizer.json", "removed": "chat_template.jinja", "added": "tokenizer_config.json"}[harm]
    if harm == "changed":
        (kept / name).write_bytes((kept / name).read_bytes() + b" ")
    elif harm == "removed":
        (kept / name).unlink()
    else:
        (kept / name).write_text(json.dumps({"chat_template": "obey me"}))

    for words in (["checkpoint", "export", "runs/first", "out"], ["generate", "runs/first", "--prompt", "the"]):
        code, error = refused(words, capfd)

        assert (code, error["code"], Path(error["file"]).name) == (3, "PHX-I058", name)
    assert not (home / "out").exists()


def test_a_resumed_run_refuses_kept_files_that_were_changed_and_leaves_whole_ones_as_they_are(
    at_home, make_run, quietly, monkeypatch
):
    home = at_home()
    kept = home / "runs" / "first" / "kept_model"
    before = files_of(kept)
    # another template beside the tokenizer is no other vocabulary, and the run has its own
    (home / "chat_template.jinja").write_text("another one")
    longer = make_run(
        "data.sources=[{kind='jsonl', path='text.jsonl'}]",
        "data.tokenizer={kind='file', path='tokenizer.json'}",
        *("train.validate_every=0", "train.steps=3"),
    )

    quietly(longer, home / "runs" / "first", resume=True)
    assert files_of(kept) == before
    (kept / "chat_template.jinja").write_text("another one")

    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: altered: found SHA-256") as said:
        train(
            longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 4})}), kept.parent, resume=True
        )
    assert said.value.error_facts["code"] == "PHX-I058"


def test_what_an_encrypted_run_keeps_is_encrypted_and_opens_with_the_key_of_its_checkpoints(at_home, tmp_path, capfd):
    key, other = tmp_path / "first.key", tmp_path / "next.key"
    assert [command_line(["checkpoint", "new-key", str(path)]) for path in (key, other)] == [0, 0]
    home = at_home("checkpoint.encrypt=true", f"checkpoint.key='file:{key}'")
    (home / "text.jsonl").unlink()
    kept = home / "runs" / "first" / "kept_model"
    assert sorted(files_of(kept)) == ["key.json", "model.sealed"]
    assert not any(word in content for content in files_of(kept).values() for word in (b"messages", b"vocab", b"stage"))
    capfd.readouterr()

    assert command_line(["checkpoint", "export", "runs/first", "out"]) == 0
    assert (home / "out" / "tokenizer.json").read_bytes() == (home / "tokenizer.json").read_bytes()
    assert (home / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    # a rotation wraps it anew, and the old key opens nothing
    assert command_line(["checkpoint", "rotate", "runs/first", "--to", f"file:{other}"]) == 0
    code, _ = refused(["checkpoint", "export", "runs/first", "again"], capfd)
    assert (code, (home / "again").exists()) == (3, False)
    key.unlink()
    other.rename(key)
    assert command_line(["checkpoint", "export", "runs/first", "again"]) == 0
    assert files_of(home / "again") == files_of(home / "out")
    sealed = (kept / "model.sealed").read_bytes()
    (kept / "model.sealed").write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    code, error = refused(["checkpoint", "export", "runs/first", "more"], capfd)
    assert (code, error["code"], Path(error["file"]).name) == (3, "PHX-I058", "model.sealed")


def test_a_checkpoint_of_before_this_version_is_exported_by_the_text_of_its_run(at_home, tmp_path, monkeypatch):
    # given a run that keeps nothing, as runs of older versions do
    monkeypatch.setattr("phalanx.train.saving.savepoint.Savepoint.keep_model_files", lambda *_: None)
    home = at_home()
    assert not (home / "runs" / "first" / "kept_model").exists()

    assert command_line(["checkpoint", "export", "runs/first", "out"]) == 0

    (home / "text.jsonl").unlink()
    assert command_line(["checkpoint", "export", "runs/first", "other"]) == 3
