"""``phalanx detect`` and ``phalanx mark``: a marked text is found, and the exit code says the verdict."""

import io
import json
import sys

import pytest
import tokenizers
import torch

from phalanx.cli.outcome import run_command
from phalanx.serve import SamplingRule
from phalanx.serve.filters import FiltersConfig, OutputFilters, TextFilters, TextRefused
from phalanx.serve.marks import MarkKeyRing, MarkPolicy, TokenMark, draw_next
from phalanx.serve.marks.wrapper import make_wrapper

MANIFEST = (24).to_bytes(4, "big") + b"jumb" + bytes(16)
VOCAB = 500


@pytest.fixture
def call(capsys, monkeypatch):
    """Run one command line; returns its exit code and what it printed."""

    def run_one(*arguments, said=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
        code = run_command(list(map(str, arguments)))
        return code, capsys.readouterr().out

    return run_one


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A vocabulary of words, a key file, a marked and an unmarked text."""
    home = tmp_path_factory.mktemp("detect")
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(home / "tokenizer.json"))
    MarkKeyRing.create(home / "marks.json")
    for name, mark in (("marked", "on"), ("plain", "off")):
        key = MarkKeyRing.read(home / "marks.json").newest
        draw = TokenMark(MarkPolicy(mark=mark), key).begin_text(SamplingRule(temperature=1.0, top_p=1.0), seed=1)
        logits = torch.zeros((1, VOCAB))
        logits[0, 0] = -100.0
        text = " ".join(f"w{int(draw_next([draw], logits)[0])}" for _ in range(250))
        (home / f"{name}.txt").write_text(text, encoding="utf-8")
    return home


@pytest.fixture
def detect(call, home):
    def run_one(text, **more):
        return call("detect", text, "--tokenizer", home / "tokenizer.json", "--keys", home / "marks.json", **more)

    return run_one


def test_a_marked_file_is_found_also_on_stdin_and_as_an_argument(home, detect):
    text = (home / "marked.txt").read_text(encoding="utf-8")

    code, output = detect(home / "marked.txt")

    assert code == 0
    assert output.startswith("marked: p = ")
    assert detect("-", said=text) == detect(text) == (code, output)


def test_the_exit_code_says_that_there_is_no_mark_or_no_verdict(home, detect):
    (plain_code, plain), (short_code, short) = detect(home / "plain.txt"), detect("w1 w2 w3")

    assert (plain_code, plain.split(":")[0]) == (5, "not marked")
    assert (short_code, short.split(":")[0]) == (7, "cannot tell")


def test_a_later_epoch_still_finds_earlier_text(home, call, tmp_path):
    keys = tmp_path / "marks.json"
    keys.write_bytes((home / "marks.json").read_bytes())
    keys.chmod(0o600)

    assert call("mark", "new-epoch", keys) == (0, f"{keys}: epoch 2\n")
    code, output = call("detect", home / "marked.txt", "--tokenizer", home / "tokenizer.json", "--keys", keys)

    assert code == 0
    assert "(8 tests)" in output


def test_a_provenance_wrapper_is_set_aside_before_the_text_is_read(home, detect):
    text = (home / "marked.txt").read_text(encoding="utf-8")
    (home / "wrapped.txt").write_text(make_wrapper(MANIFEST) + text, encoding="utf-8")

    code, output = detect(home / "wrapped.txt")

    assert code == 0
    assert output.splitlines()[0] == detect(text)[1].strip()
    assert "a C2PA wrapper of 24 bytes was set aside; its signature was not checked" in output


def test_json_has_the_verdict_and_no_secret(home, call):
    arguments = ["detect", home / "marked.txt", "--tokenizer", home / "tokenizer.json", "--keys", home / "marks.json"]
    code, output = call(*arguments, "--json")
    answer = json.loads(output)

    assert code == 0
    assert (answer["verdict"], answer["epoch"], answer["num_tests"], answer["source"]) == ("marked", 1, 4, "file")
    assert answer["p_value"] <= 1e-6
    assert MarkKeyRing.read(home / "marks.json").newest.secret.hex() not in output


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--keys", "missing.json", 3),
        ("--tokenizer", "missing", 3),
        ("--max-p", "0", 2),
    ],
)
def test_mistakes_have_their_exit_codes(home, call, option, value, code):
    options = {"--tokenizer": home / "tokenizer.json", "--keys": home / "marks.json"} | {option: value}

    assert call("detect", "w1 w2", *(word for pair in options.items() for word in pair))[0] == code


def test_a_file_that_is_no_text_is_refused(detect, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")

    assert detect(tmp_path / "bytes")[0] == 3


def test_keys_are_not_overwritten(home, call):
    assert call("mark", "new-keys", home / "marks.json")[0] == 3


def test_an_index_of_training_text_is_made_and_not_overwritten(call, tmp_path):
    trained = " ".join(f"word{number}" for number in range(100))
    (tmp_path / "notes.txt").write_text(trained, encoding="utf-8")
    arguments = ["data", "verbatim-index", tmp_path / "index.npy", "--text", tmp_path / "notes.txt"]

    assert call(*arguments)[0] == 0
    assert call(*arguments)[0] == 2
    filters = TextFilters(FiltersConfig(output=OutputFilters(verbatim_index=tmp_path / "index.npy")))
    with pytest.raises(TextRefused, match="verbatim: training_text at character"):
        filters.check_output("It " + trained)


def test_an_index_of_no_text_is_refused(call, tmp_path):
    assert call("data", "verbatim-index", tmp_path / "index.npy")[0] == 2
