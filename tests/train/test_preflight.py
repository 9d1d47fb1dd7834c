"""What a run reads is looked at before anything is begun: files, fields and the first documents."""

import io
import json
import re

import pytest
from rich.console import Console

from phalanx.data.spool import Intake
from phalanx.errors import ConfigError, DataError, ModelError
from phalanx.models.directory import model_directory
from phalanx.train import describe_run, entry, load_run, train
from phalanx.train.setup.guard_outlook import idle_guard_warning
from phalanx.train.setup.preflight import check_inputs
from tiny_run_file import tiny_run_file

LINE = '{"text": "a shield covers the neighbour"}\n'

NO_TENSORS = "\x02\0\0\0\0\0\0\0{}"
"""A file of safetensors: eight bytes with the length of its header, and the header."""


@pytest.fixture
def reading(tmp_path, make_run):
    """A run that reads this file."""

    def read(kind, name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return make_run(f'data.sources=[{{kind="{kind}",path="{path}"}}]', "data.tokenizer.vocab_size=257")

    return read


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("jsonl", "a.jsonl", LINE),
        ("jsonl", "a.jsonl", '{"text": ""}\n' * 20 + LINE),
        ("jsonl", "a.jsonl", LINE * 4000 + "{"),
        ("text", "a.txt", "shields"),
        ("text", "a.txt", b"\xff" * (1 << 24) + b"\xff"),
    ],
    ids=["a text", "text behind empty ones", "a mistake far behind", "plain", "too large to be read here"],
)
def test_only_the_beginning_is_looked_at(reading, kind, name, content):
    check_inputs(reading(kind, name, content))


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("jsonl", LINE * 3 + "{", r"data\.sources\.0: .*line 4: is not JSON"),
        ("jsonl", LINE + '{"txt": 1}', "line 2: no field 'text'; its fields are: txt"),
        ("jsonl", "\n\n", "a.jsonl: holds no text"),
        ("text", "  \n", "a.text: holds no text"),
        ("text", b"caf\xe9", "byte 3 .* is not utf-8"),
    ],
)
def test_a_mistake_at_the_beginning_is_found_by_dry_run_and_run(reading, tmp_path, kind, content, said):
    run = reading(kind, f"a.{kind}", content)

    for begin in (train, describe_run):
        with pytest.raises(DataError, match=said):
            begin(run, tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_small_text_is_read_whole(reading):
    with pytest.raises(DataError, match=r"a\.jsonl, line 21: is not JSON"):
        check_inputs(reading("jsonl", "a.jsonl", LINE * 20 + "{"))


@pytest.mark.parametrize("more", [0, 1])
def test_the_vocabulary_of_a_small_text_is_trained_before_anything_begins(reading, make_run, tmp_path, more):
    reading("text", "a.txt", "x shields cover shields cover")
    # 256 bytes, the end of a text, and of each word that comes twice a merge fewer than it has bytes
    source = f'{{kind="text",path="{tmp_path}/a.txt"}}'
    held_out = f'data.validation=[{{name="own",sources=[{source}]}}]'
    chosen = f"data.sources=[{source}]", "data.validation_share=0.0", held_out
    run = make_run(*chosen, f"data.tokenizer.vocab_size={257 + 7 + 5 + more}")

    if not more:
        check_inputs(run)
        return
    with pytest.raises(DataError, match=r"vocab_size=270: the training text supports 269 tokens only") as refusal:
        check_inputs(run)
    assert refusal.value.error_facts["code"] == "PHX-I017"


def test_a_text_that_is_all_held_out_is_left_to_its_preparation(reading, make_run, tmp_path):
    reading("text", "a.txt", "shields")
    chosen = f'data.sources=[{{kind="text",path="{tmp_path}/a.txt"}}]', "data.validation_share=0.5"
    runs = [make_run(*chosen, f"train.seed={seed}") for seed in range(8)]

    refused = 0
    for run in runs:
        try:
            check_inputs(run)
        except DataError:
            refused += 1
    assert 0 < refused < len(runs)


def test_the_second_source_is_named_by_its_number(make_run, tmp_path):
    (tmp_path / "a.txt").write_text("shields")
    sources = f'data.sources=[{{kind="text",path="{tmp_path}/a.txt"}},{{kind="text",path="{tmp_path}/b"}}]'

    with pytest.raises(DataError, match=rf"data\.sources\.1: {tmp_path}/b: not found"):
        check_inputs(make_run(sources))


def model(tmp_path, **files):
    """A directory with a config, weights in name only, and these files."""
    (tmp_path / "model").mkdir()
    for name, content in {
        "config.json": json.dumps({"model_type": "gpt2"}),
        "model.safetensors": NO_TENSORS,
        **files,
    }.items():
        (tmp_path / "model" / name).write_text(content)
    return f'model={{path="{tmp_path}/model"}}'


def test_a_model_with_its_tokenizer_passes(make_run, tmp_path):
    check_inputs(make_run(model(tmp_path, **{"tokenizer.json": "{}"}), 'data.tokenizer={kind="model"}'))


def test_a_model_without_tokenizer_json_is_told_how_it_is_written(make_run, tmp_path):
    chosen = model(tmp_path, **{"vocab.json": "{}"})

    check_inputs(make_run(chosen))
    with pytest.raises(ModelError, match=rf"{tmp_path}/model/tokenizer\.json: is missing.*phalanx model import"):
        check_inputs(make_run(chosen, 'data.tokenizer={kind="model"}'))
    (tmp_path / "model" / "merges.txt").touch()
    check_inputs(make_run(chosen, 'data.tokenizer={kind="model"}'))


def test_an_architecture_comes_without_a_tokenizer(make_run):
    with pytest.raises(ModelError, match=r"model\.architecture comes without a tokenizer; use kind = \"bpe\""):
        check_inputs(make_run('data.tokenizer={kind="model"}'))


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_a_name_of_the_hub_is_told_how_to_fetch_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError, match=rf"hf download {name} --local-dir models/{name.split('/')[-1]}"):
        model_directory(name)


@pytest.mark.parametrize("path", ["./gpt2", "/no/such/model", "a/b/c", "../model"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError) as refusal:
        model_directory(path)

    assert "hf download" not in str(refusal.value)


def test_a_file_is_no_model_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(ModelError, match="is a file; give the directory that it lies in"):
        model_directory(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["pipeline.stages=2"], True),
        (["pipeline.stages=1"], True),
        (["pipeline.stages=2", "guard.mode=off"], False),
        (["pipeline.stages=3"], False),
    ],
)
def test_a_guard_with_nobody_to_check_says_so(make_run, overrides, warned):
    said = idle_guard_warning(make_run(*overrides))

    assert (said is not None) is warned
    if warned:
        assert "checks nothing here: pipeline.stages = " in said


def test_the_warning_is_shown_when_such_a_run_begins(trained_once):
    assert 'WARNING: guard.mode = "phalanx" checks nothing here' in trained_once[0]["shown"]


def test_a_source_of_a_further_validation_set_is_looked_at_too(make_run, tmp_path):
    missing = f'data.validation=[{{name="wiki",sources=[{{kind="text",path="{tmp_path}/none.txt"}}]}}]'

    with pytest.raises(DataError, match=r'data\.validation "wiki"\.0: .*none\.txt'):
        check_inputs(make_run(missing))


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        ("preferences = { sources = [{ path = 'pairs.jsonl' }] }", "set data.validation_share above 0"),
        ("sources = [{ kind = 'text', path = 'a.txt' }]", "above 0, or name a set in data.validation"),
        ("conversations = { sources = [{ path = 'chats.jsonl' }] }", "above 0, or name a set in data.validation"),
    ],
    ids=["preferences", "text", "conversations"],
)
def test_a_run_without_anything_held_out_is_refused_before_keys_are_made(source, cure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a shield covers the neighbour")
    turns = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "a shield"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "who?", "chosen": "a shield", "rejected": "a spear"}\n')
    data = f'{source}\ntokenizer = {{ kind = "bpe", vocab_size = 257 }}\nsequence_length = 15\nvalidation_share = 0.0\n'
    text = re.sub(r"(?<=\[data\]\n).*?(?=\n\[)", data, tiny_run_file(), flags=re.DOTALL)
    if source.startswith("preferences"):
        text = text.replace("[train]\n", '[train]\nobjective = "dpo"\n')
    (tmp_path / "run.toml").write_text(text)

    with pytest.raises(ConfigError, match=cure) as refusal:
        train(load_run(tmp_path / "run.toml"), tmp_path / "run")

    assert refusal.value.error_facts["key"] == "data.validation_share"
    assert not (tmp_path / "run").exists()
    # a set of its own is refused beside preferences, so it is no cure there
    assert ("data.validation" in refusal.value.error_facts["do"].removeprefix("set data.validation_share")) == (
        not source.startswith("preferences")
    )


def test_an_interrupted_preparation_says_what_is_kept(make_run, tmp_path, monkeypatch):
    def interrupt(*_ignored):
        raise KeyboardInterrupt

    run, console = make_run("train.steps=1"), Console(record=True, width=400, file=io.StringIO())
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "my cache"))
    with monkeypatch.context() as patch:
        patch.setattr(Intake, "spool_sources", interrupt)
        summary = train(run, tmp_path / "run", console=console)

    assert summary["status"] == "interrupted"
    told = console.export_text()
    assert "interrupted before the first step; finished preparations are in" in told
    assert "--resume" not in told and f"'{tmp_path}/my cache'" in told
    # the same command begins again
    assert train(run, tmp_path / "run", console=Console(file=io.StringIO()))["status"] == "completed"


def test_an_interrupted_count_of_epochs_says_what_is_kept(make_run, tmp_path, monkeypatch):
    def interrupt(*_ignored):
        raise KeyboardInterrupt

    console = Console(record=True, width=400, file=io.StringIO())
    monkeypatch.setattr(entry, "settle_steps", interrupt)

    with pytest.raises(KeyboardInterrupt):
        train(make_run("train.steps=1"), tmp_path / "run", console=console)

    assert "interrupted while preparing; finished preparations are in" in console.export_text()
    assert not (tmp_path / "run").exists()
