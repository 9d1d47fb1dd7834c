"""``phalanx tokenizer``: a vocabulary is made, looked at and compared from the command line."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from phalanx.cli import run_command
from phalanx.data.config import FileTokenizerConfig
from phalanx.data.tokenizers import load_tokenizer, vocabulary_digest

TEXTS = ["The stage sends what it computed to the next stage, and the next stage checks 17 of 128. \n" * 5] * 3
PIECES = ("--kind", "wordpiece", "--set", "tokenizer.vocab_size=70")
GERMAN = "Die Katze sitzt auf dem Dach und schaut den Vögeln zu, die über die Felder fliegen. " * 5


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(TEXTS), encoding="utf-8")
    lines = [json.dumps({"body": text}) for text in (TEXTS[0], GERMAN)]
    (tmp_path / "texts" / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def told(capfd, words):
    code = run_command([*words, "--json"])
    return code, json.loads(capfd.readouterr().out)


def train(out, *more):
    return ["tokenizer", "train", str(out), "--text", "texts", "--field", "body", "--vocab-size", "300", *more]


def test_a_trained_vocabulary_is_one_that_a_run_can_name(home, capfd):
    code, found = told(capfd, train("made/first", "--set", "tokenizer.special_tokens=['<|user|>']"))

    tokenizer = load_tokenizer(FileTokenizerConfig(path=home / "made/first/tokenizer.json"), None)
    assert code == 0
    assert found["vocabulary_digest"] == vocabulary_digest(tokenizer)
    assert (tokenizer.vocab_size, found["documents"]) == (300, 3)
    assert json.loads((home / "made/first/tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_an_empty_file_of_a_folder_is_passed_over_and_a_named_one_told_of(home, capfd):
    (home / "texts" / "c.txt").write_text("")

    assert told(capfd, train("out"))[0] == 0
    code, found = told(capfd, train("other", "--text", "texts/c.txt"))
    assert code == 3
    assert "c.txt: is empty" in found["error"]["message"]


def test_training_twice_gives_the_same_bytes_in_every_file(home, capfd):
    for name in ("one", "two"):
        assert told(capfd, train(name))[0] == 0

    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(name).iterdir()}
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]
    assert set(digests[0]) == {"tokenizer.json", "tokenizer_config.json", "recipe.toml", "training.json"}


def test_the_recipe_that_is_kept_makes_the_same_vocabulary_again(home, capfd):
    told(capfd, train("one", *PIECES, "--set", "tokenizer.lowercase=true"))

    code, _ = told(capfd, ["tokenizer", "train", "two", "--recipe", "one/recipe.toml"])

    assert code == 0
    assert Path("two/tokenizer.json").read_bytes() == Path("one/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["tokenizer", "train", "out"], 2, "either --recipe or --text"),
        (["tokenizer", "train", "out", "--text", "texts", "--recipe", "r.toml"], 2, "either --recipe or --text"),
        (["tokenizer", "train", "out", "--recipe", "absent.toml"], 2, "absent.toml: cannot be read"),
        (["tokenizer", "train", "out", "--text", "absent"], 3, "absent: not found"),
        (["tokenizer", "train", "texts", "--text", "texts/a.txt"], 3, "already exists"),
        (train("out", "--set", "tokenizer.byte_fallback=true"), 2, "byte_fallback: unknown key; choices"),
        (train("out", "--set", "tokenizer.vocab_size=9999"), 3, "supports"),
        (["tokenizer", "train", "out", "--text", "texts"], 3, "no field 'text'"),
        (["tokenizer", "check", "absent"], 3, "absent: cannot be read"),
        (["tokenizer", "compare", "absent", "--text", "texts/a.txt"], 3, "absent: cannot be read"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_left_behind(home, capfd, words, exit_code, said):
    before = sorted(path.name for path in home.iterdir())

    code, found = told(capfd, words)

    assert code == exit_code
    assert said in found["error"]["message"]
    assert sorted(path.name for path in home.iterdir()) == before


def test_a_file_whose_name_is_not_utf8_is_named(home, capfd):
    (home / "texts" / os.fsdecode(b"na\xefve.txt")).write_text("a word")

    code, found = told(capfd, train("out"))

    assert code == 3
    assert r"na\xefve.txt: its path is not UTF-8, which a recipe is written in; rename" in found["error"]["message"]


def test_text_without_a_word_is_refused(home, capfd):
    (home / "texts" / "a.txt").write_text(" \n ")

    code, found = told(capfd, ["tokenizer", "train", "out", "--text", "texts/a.txt", "--vocab-size", "257"])

    assert code == 3
    assert "holds no text" in found["error"]["message"]


def test_check_says_what_a_vocabulary_is_and_does(home, capfd):
    told(capfd, train("one"))

    code, found = told(capfd, ["tokenizer", "check", "one", "--text", "texts/a.txt"])

    assert code == 0
    assert (found["kind"], found["vocab_size"], found["bytes_covered"]) == ("BPE", 300, 256)
    assert (found["returned_share"], found["unknown_share"], found["first_altered"]) == (1.0, 0.0, None)
    assert (found["encodes_by"], found["chat_template"], found["eos_token"]) == ("tiktoken", False, "<|endoftext|>")
    assert found["refused"] == []


def test_check_says_what_word_pieces_give_up(home, capfd):
    told(capfd, train("one", *PIECES))
    (home / "other.txt").write_text("漢字 and\n\nmore", encoding="utf-8")

    code, found = told(capfd, ["tokenizer", "check", "one", "--text", "other.txt"])

    assert code == 0
    assert (found["bytes_covered"], found["returned_share"], found["first_altered"]) == (0, 0.0, "漢字 and\n\nmore")
    assert found["unknown_share"] > 0


def _template(home):
    (home / "one" / "chat_template.jinja").write_text("<|im_start|>{{ role }}<|endoftext|>")


def _small_model(home):
    (home / "one" / "config.json").write_text('{"vocab_size": 299}')


def _absent_padding(home):
    path = home / "one" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<pad>"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_template, "the chat template writes '<|im_start|>', which is no token"),
        (_small_model, "its largest id is 299, but the model has 299 embeddings"),
        (_absent_padding, "pad_token is '<pad>', which the vocabulary lacks"),
    ],
)
def test_what_a_run_would_do_wrong_is_an_error(home, capfd, change, said):
    told(capfd, train("one"))
    change(home)

    code, found = told(capfd, ["tokenizer", "check", "one"])

    assert code == 3
    assert found["refused"] == [said]
    assert said in found["error"]["message"]
    assert found["vocab_size"] == 300


def test_compare_counts_by_file_with_exact_sums(home, capfd):
    told(capfd, train("one"))
    told(capfd, train("two", "--set", "tokenizer.vocab_size=257"))

    code, found = told(capfd, ["tokenizer", "compare", "one", "two", "--text", "texts", "--field", "body"])

    rows = {(row["file"], row["vocabulary"]): row for row in found["rows"]}
    assert code == 0
    assert set(rows) == {(file, name) for file in ("a.txt", "b.jsonl") for name in ("one", "two")}
    # a vocabulary of bytes alone has a token for each
    bytes_alone = rows["b.jsonl", "two"]
    assert bytes_alone["tokens"] == bytes_alone["size_bytes"] == len((TEXTS[0].strip() + GERMAN.strip()).encode())
    assert rows["b.jsonl", "one"]["tokens_per_byte"] < bytes_alone["tokens_per_byte"] == 1.0


def test_compare_counts_by_language_and_draws(home, capfd):
    told(capfd, train("one"))
    words = ["tokenizer", "compare", "one", "--text", "texts/b.jsonl", "--field", "body", "--by", "language"]

    code, found = told(capfd, [*words, "--out", "fertility.svg"])

    assert code == 0
    assert {row["language"]: row["documents"] for row in found["rows"]} == {"de": 1, "en": 1}
    picture = Path("fertility.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "de, one" in picture
