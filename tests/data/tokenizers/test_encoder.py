"""The faster library is used where it gives the same ids, and only there."""

import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from phalanx.data.tokenizers import ByteBpeTraining, Encoder, WordPieceTraining, train_tokenizer
from phalanx.data.tokenizers.patterns import KNOWN_PATTERNS, LLAMA3
from phalanx.data.tokenizers.probes import probe_texts
from phalanx.data.tokenizers.tiktoken_encoder import UnequalError, check_merges, make_tiktoken_encoder
from phalanx.data.tokenizers.tokenizer import wrap_backend
from phalanx.errors import DataError


def all_characters() -> str:
    """Return a text of every code point that a text can have, in order."""
    return "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))


def made_texts(count=60):
    draw = random.Random(3)
    words = ["".join(draw.choices("aeiouбвгδ漢字lmnrst", k=draw.randint(1, 8))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=80)) + f"\n{at}'s  {'=' * at} {at * 7919}" for at in range(1, count)]


@pytest.fixture(scope="module", params=[False, True], ids=["digits together", "digits apart"])
def trained(request):
    return train_tokenizer(made_texts(), ByteBpeTraining(vocab_size=700, split_digits=request.param))


@pytest.fixture(scope="module")
def encoder(trained):
    return Encoder(trained)


def plain_ids(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def changed(tokenizer, change):
    parts = json.loads(tokenizer.to_json())
    change(parts)
    return wrap_backend(tokenizers.Tokenizer.from_str(json.dumps(parts)), "<|endoftext|>", "changed")


def test_ids_are_those_of_tokenizers_on_texts_and_probes(trained, encoder):
    texts = [*made_texts(), *probe_texts(("<|endoftext|>",))]

    found = encoder.encode_batch(texts)

    assert (encoder.library, encoder.reason) == ("tiktoken", "")
    assert all(ids.dtype == np.uint32 for ids in found)
    assert [ids.tolist() for ids in found] == [plain_ids(trained, text) for text in texts]


@settings(
    deadline=None,
    max_examples=3 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(min_size=1, max_size=60) | st.text("ab '\n\t s漢é1٣\u00a0!", min_size=1, max_size=60))
def test_ids_are_those_of_tokenizers_on_any_text(trained, encoder, text):
    assert encoder.encode_batch([text])[0].tolist() == plain_ids(trained, text)


def test_ids_are_those_of_tokenizers_for_characters_of_every_plane(trained, encoder):
    characters = all_characters()
    texts = ["".join(f"{one} a{one}" for one in characters[at : at + 997]) for at in range(0, len(characters), 29_989)]

    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == [plain_ids(trained, text) for text in texts]


def test_long_white_space_is_left_to_the_library_that_can(trained, encoder):
    text = "a" + " " * 50_000 + "b"

    assert encoder.encode_batch([text, "c"])[0].tolist() == plain_ids(trained, text)


def test_threads_do_not_change_the_order_of_texts(trained):
    texts = made_texts()

    found = Encoder(trained, threads=3).encode_batch(texts)

    assert [ids.tolist() for ids in found] == [plain_ids(trained, text) for text in texts]


def test_little_text_is_encoded_without_a_proof(trained):
    encoder = Encoder(trained, size_bytes=1000)

    assert (encoder.library, encoder.reason) == ("tokenizers", "there is little text")
    assert encoder.encode_batch(["ab"])[0].tolist() == plain_ids(trained, "ab")


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_each_known_pattern_cuts_alike_in_both_libraries(trained, pattern):
    def cut(parts):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        holder = tokenizers.Tokenizer(models.BPE())
        holder.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_alone])
        parts["pre_tokenizer"] = json.loads(holder.to_str())["pre_tokenizer"]

    tokenizer = changed(trained, cut)
    encoder = Encoder(tokenizer)
    texts = [*made_texts(5), *probe_texts()]

    if pattern == LLAMA3:
        assert encoder.library in ("tiktoken", "tokenizers")
    else:
        assert encoder.library == "tiktoken"
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == [plain_ids(tokenizer, text) for text in texts]


def test_digits_cut_beforehand_are_one_pattern(trained):
    def cut(parts):
        holder = tokenizers.Tokenizer(models.BPE())
        holder.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        parts["pre_tokenizer"] = json.loads(holder.to_str())["pre_tokenizer"]

    tokenizer = changed(trained, cut)
    encoder = Encoder(tokenizer)
    texts = [*made_texts(5), *probe_texts()]

    assert encoder.library == "tiktoken"
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == [plain_ids(tokenizer, text) for text in texts]


def _drop_byte(parts):
    vocabulary = parts["model"]["vocab"]
    vocabulary["zz"] = vocabulary.pop("A")


def _normalize(parts):
    parts["normalizer"] = {"type": "NFC"}


def _prefix(parts):
    (parts["pre_tokenizer"].get("pretokenizers") or [parts["pre_tokenizer"]])[-1]["add_prefix_space"] = True


def _cut_otherwise(parts):
    parts["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


def _add_plain(parts):
    parts["added_tokens"].append(
        {"id": 700, "content": "zzz", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": False}
    )  # fmt: skip


def _second_merge(parts):
    vocabulary, merges = parts["model"]["vocab"], parts["model"]["merges"]
    vocabulary |= {"xy": 700, "yz": 701, "xyz": 702}
    merges += [["x", "y"], ["y", "z"], ["xy", "z"], ["x", "yz"]]


def _other_half(parts):
    """Make "xyz" of x and yz, although xy is joined first wherever the three are side by side."""
    vocabulary, merges = parts["model"]["vocab"], parts["model"]["merges"]
    vocabulary |= {"xy": 700, "yz": 701, "xyz": 702}
    merges += [["x", "y"], ["y", "z"], ["x", "yz"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_byte, "lacks b'A'; it needs all 256 bytes"),
        (_normalize, "tiktoken lacks: normalizer"),
        (_prefix, "not cut into bytes"),
        (_cut_otherwise, "an untested pattern"),
        (_add_plain, "'zzz' is added but not special"),
        (_second_merge, "b'xyz' is made by two merges"),
        (_other_half, "b'xyz' differs from the one that tiktoken uses"),
    ],
)
def test_a_vocabulary_that_tiktoken_would_read_otherwise_is_left_to_tokenizers(change, said):
    tokenizer = changed(train_tokenizer(["lower lower ab ab"] * 3, ByteBpeTraining(vocab_size=258)), change)
    encoder = Encoder(tokenizer)

    assert encoder.library == "tokenizers"
    assert said in encoder.reason
    assert encoder.encode_batch(["Abc xyz"])[0].tolist() == plain_ids(tokenizer, "Abc xyz")


def test_without_the_proof_of_merges_the_ids_would_differ():
    tokenizer = changed(train_tokenizer(["lower lower ab ab"] * 3, ByteBpeTraining(vocab_size=258)), _other_half)
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"xy": 256, b"yz": 257, b"xyz": 258}
    import tiktoken

    encoding = tiktoken.Encoding("x", pat_str=r"[^ ]+", mergeable_ranks=ranks, special_tokens={})

    assert encoding.encode_ordinary("xyz") == [258]
    assert tokenizer.backend.encode("xyz", add_special_tokens=False).tokens == ["xy", "z"]
    with pytest.raises(UnequalError, match="b'xyz'"):
        check_merges([(b"x", b"y"), (b"y", b"z"), (b"x", b"yz")])
    check_merges([(b"y", b"z"), (b"x", b"y"), (b"x", b"yz")])


def test_other_kinds_are_left_to_tokenizers():
    tokenizer = train_tokenizer(made_texts(), WordPieceTraining(vocab_size=300))

    with pytest.raises(UnequalError, match="the vocabulary is WordPiece, not byte-level BPE"):
        make_tiktoken_encoder(tokenizer.backend)


def test_an_absent_library_is_told_and_nothing_is_refused(trained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)

    encoder = Encoder(trained)

    assert encoder.library == "tokenizers"
    assert "phalanx-train[tokenizers]" in encoder.reason


@pytest.mark.parametrize("size_bytes", [None, 10])
def test_a_text_that_is_none_is_refused(trained, size_bytes):
    encoder = Encoder(trained, size_bytes)

    with pytest.raises(DataError, match="no token at all"):
        encoder.encode_batch(["a", ""])
    with pytest.raises(DataError, match="cannot be encoded"):
        encoder.encode_batch(["a", "\ud800"])


def test_a_tokenizer_whose_texts_can_end_a_document_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"end": 0, "a": 1}, unk_token="a"))
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    encoder = Encoder(wrap_backend(backend, "end", "made"))

    with pytest.raises(DataError, match="the end-of-text token inside a document"):
        encoder.encode_batch(["end"])
