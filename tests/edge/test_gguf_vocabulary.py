"""A tokenizer gets llama.cpp's name for its rules, or is refused by the part that llama.cpp has no rule for."""

import json

import pytest

from phalanx.edge.gguf_vocabulary import read_vocabulary
from phalanx.errors import ModelError
from tiny_edge_models import byte_tokenizer


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    byte_tokenizer().save_pretrained(path)
    return json.loads((path / "tokenizer.json").read_text())


def read(tmp_path, parts, vocab_size=320):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parts))
    return read_vocabulary(path, vocab_size, 0, 2)


def test_a_byte_level_vocabulary_is_read_with_its_kinds(tmp_path, parts):
    vocabulary = read(tmp_path, parts, vocab_size=330)

    assert (vocabulary.model, vocabulary.pre, vocabulary.adds_bos, vocabulary.adds_eos) == (
        "gpt2",
        "gpt-2",
        False,
        False,
    )
    assert len(vocabulary.tokens) == len(vocabulary.kinds) == 330
    assert vocabulary.kinds[:4] == [3, 3, 3, 1]
    assert vocabulary.tokens[-1] == "[PAD329]"
    assert vocabulary.kinds[-1] == 5


def test_digits_apart_have_a_name_of_their_own(tmp_path):
    byte_tokenizer(split_digits=True).save_pretrained(tmp_path)

    assert read_vocabulary(tmp_path / "tokenizer.json", 320, 0, 2).pre == "smollm"


def test_what_is_written_before_a_text_is_the_begin_of_text(tmp_path, parts):
    framed = {
        **parts,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        },
    }

    vocabulary = read(tmp_path, framed)

    assert (vocabulary.adds_bos, vocabulary.bos_id, vocabulary.adds_eos) == (True, 1, False)


REFUSED = {
    "another model": (lambda parts: parts["model"].update(type="WordPiece"), "model.type|no tokenizer.json"),
    "a normalizer": (lambda parts: parts.update(normalizer={"type": "Lowercase"}), "normalizer"),
    "a prefix space": (lambda parts: parts["pre_tokenizer"].update(add_prefix_space=True), "pre_tokenizer"),
    "no pre-tokenizer": (lambda parts: parts.update(pre_tokenizer=None), "pre_tokenizer"),
    "bytes as a last resort": (lambda parts: parts["model"].update(byte_fallback=True), "SentencePiece"),
    "a token that eats spaces": (lambda parts: parts["added_tokens"][0].update(lstrip=True), "takes spaces"),
    "no merges": (lambda parts: parts["model"].update(merges=[]), "merges"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_has_no_rule_for_is_refused_by_name(tmp_path, parts, name):
    change, words = REFUSED[name]
    changed = json.loads(json.dumps(parts))
    change(changed)

    with pytest.raises(ModelError, match=words):
        read(tmp_path, changed)


def test_more_tokens_than_rows_are_refused(tmp_path, parts):
    with pytest.raises(ModelError, match="rows"):
        read(tmp_path, parts, vocab_size=299)
