"""Classes of texts by an exported classifier: those of its logits, for people and for programs; claims are refused."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import ConfigError, DataError, ModelError
from phalanx.models import parse_hub_config
from phalanx.serve import TextModel, classify_file, open_classifier

WORDS = ["<unk>", "<end>", "pain", "fever", "wrist", "heart"]
CLASSES = ("cold", "break \x1b[31m", "other")
CONFIG = {"model_type": "gpt2", "vocab_size": 6, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
KEYS = {"max_tokens": 4, "pooling": "mean"}


def write_classifier(directory, **changes):
    config = parse_hub_config(CONFIG | {"bos_token_id": 1, "eos_token_id": 1}, "tiny")
    config.num_labels = 3
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.classifier.weight, std=3.0)
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    written |= {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
    written |= {"phalanx_classifier": KEYS, **changes}
    (directory / "config.json").write_text(json.dumps(written))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"})
    )
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("classifier"))


def test_a_text_has_the_class_of_the_mean_of_its_tokens_and_what_is_cut_off_does_not_count(directory):
    model, plain = open_classifier(directory), AutoModelForTokenClassification.from_pretrained(directory).eval()
    texts = ["pain", "wrist pain fever", "heart", "fever heart wrist pain pain pain", "wrist wrist wrist heart"] * 9

    results = model.classify_texts(texts)

    for text, result in zip(texts, results, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()[:4]]])
        shares = plain(ids).logits.detach()[0].mean(dim=0).softmax(dim=0)
        assert result.label == CLASSES[int(shares.argmax())]
        assert result.probability == pytest.approx(float(shares.max()), abs=1e-5)
        assert result.is_cut == (len(text.split()) > 4)
    assert len({result.label for result in results}) > 1
    assert model.classify_texts([]) == []
    with pytest.raises(DataError, match="gave no token at all"):
        model.classify_texts(["pain", " "])
    with pytest.raises(DataError, match="a text: holds a lone surrogate"):
        model.classify_texts(["pain", "caf\udce9"])


def test_a_file_goes_on_where_it_stopped_and_counts_what_was_cut(directory, tmp_path):
    model, source, target = open_classifier(directory), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # a line separator in a text, as pages have it, ends no line of the file
    rows = [{"id": number, "text": "pain \u2028 fever " * (1 + number % 3)} for number in range(40)]
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")

    assert classify_file(model, source, target, lambda done, total: None) == (40, 13)
    whole = target.read_text()
    target.write_text("\n".join(whole.split("\n")[:7]) + '\n{"id": 7, "te')

    assert classify_file(model, source, target, lambda done, total: None)[0] == 33
    assert target.read_text() == whole
    with pytest.raises(DataError, match="/dev/full: is no regular file"):
        classify_file(model, source, Path("/dev/full"), lambda done, total: None)
    source.write_text('{"text": "pain\u2028wrist\x85"}\n', encoding="utf-8")
    assert classify_file(model, source, tmp_path / "line.jsonl", lambda done, total: None) == (1, 0)
    source.write_text('{"text": " "}\n')
    with pytest.raises(DataError, match=r"in\.jsonl, line 1: expected text"):
        classify_file(model, source, tmp_path / "other.jsonl", lambda done, total: None)
    source.write_text('{"text": "heart"}\n')
    with pytest.raises(DataError, match="is of another input"):
        classify_file(model, source, target, lambda done, total: None)
    source.write_text('{"text": "heart"}\n{"text": "heart", "label": "other"}\n')
    with pytest.raises(DataError, match="line 2: has label, which the result would replace; rename it"):
        classify_file(model, source, tmp_path / "other.jsonl", lambda done, total: None)
    source.write_text('{"text": "heart", "id": "\\ud800"}\n')
    with pytest.raises(DataError, match="line 1: cannot be written again"):
        classify_file(model, source, tmp_path / "other.jsonl", lambda done, total: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phalanx_classifier": None}, "found None"),
        ({"phalanx_classifier": {"max_tokens": 0, "pooling": "mean"}}, "max_tokens: found 0"),
        ({"phalanx_classifier": KEYS | {"pooling": "last"}}, "pooling: found 'last'"),
        ({"phalanx_classifier": KEYS | {"max_tokens": 17}}, "at most the model's window of 16"),
        ({"id2label": {"0": "a", "1": "b", "4": "c"}}, "id2label: expected a name"),
        ({"n_embd": 16384}, "claims"),
        ({"id2label": {str(number): str(number) for number in range(5000)}}, "claims"),
    ],
)
def test_what_a_directory_claims_is_checked(tmp_path, changes, words):
    write_classifier(tmp_path, **changes)

    with pytest.raises(ModelError, match=words):
        open_classifier(tmp_path)


def test_a_head_that_is_missing_is_not_drawn(tmp_path):
    weights = load_file(write_classifier(tmp_path) / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match="claims"):
        open_classifier(tmp_path)
    # as many numbers under another name
    save_file(weights | {"head.weight": torch.zeros(3, 16)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the tensors classifier\.weight"):
        open_classifier(tmp_path)


def test_damaged_weights_are_named_and_classify_nothing(tmp_path):
    weights = load_file(write_classifier(tmp_path) / "model.safetensors")
    weights["classifier.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match="no finite number; the weights are damaged"):
        open_classifier(tmp_path).classify_texts(["pain"])


def test_a_classifier_writes_no_texts_and_a_language_model_classifies_none(directory, tmp_path):
    with pytest.raises(ModelError, match="use phalanx classify"):
        TextModel(directory)
    config = json.loads((write_classifier(tmp_path) / "config.json").read_text())
    del config["phalanx_classifier"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match="give a run that learned to classify"):
        open_classifier(tmp_path)


def test_the_command_prints_classes_without_what_steers_a_terminal(directory):
    runner = CliRunner()
    lines = runner.invoke(app, ["classify", str(directory)], input="pain\n\nwrist\nheart\u2028heart\nfever\n")
    one = runner.invoke(app, ["classify", str(directory), "--text", "pain fever wrist heart pain"])
    both = runner.invoke(app, ["classify", str(directory), "--text", "pain", "--input", "x", "--out", "y"])

    assert (lines.exit_code, one.exit_code) == (0, 0)
    assert len(lines.output.splitlines()) == 4
    assert "break" in lines.output
    assert "\x1b" not in lines.output
    assert "cut off" in one.output
    assert isinstance(both.exception, ConfigError)
