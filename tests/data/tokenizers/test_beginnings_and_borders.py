"""What a text begins with, and where two texts meet: for tokenizers of every make, as transformers' encodes them."""

import json

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from phalanx.data.chat.settings import PreferencesConfig, PreferenceSource
from phalanx.data.config import DataConfig, FileTokenizerConfig, ModelTokenizerConfig
from phalanx.data.preferences import prepare_preferences
from phalanx.data.tasks import Example
from phalanx.data.tokenizers.check import check_tokenizer
from phalanx.data.tokenizers.encoder import Encoder
from phalanx.data.tokenizers.tokenizer import fingerprint_tokenizer, load_tokenizer, wrap_backend
from phalanx.errors import DataError
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.serve import TextModel
from phalanx.train.batches.labelled import encode_rows
from phalanx.train.batches.samples import Continuation, TextSampler
from phalanx.train.train_section import SamplesConfig

END, BEGIN = "</s>", "<s>"
WORDS = [
    "a",
    "b",
    "ab",
    "the",
    " the",
    "the ",
    ". ",
    "\n",
    "\n\n",
    "  ",
    " ",
    "é",
    "中",
    "🛡",
    "1",
    "12",
    "?",
    ": ",
    "x:",
]


def framed(made, *, begins=True, ends=False):
    made.add_special_tokens([END, BEGIN])
    single = f"{BEGIN + ' ' if begins else ''}$A{' ' + END if ends else ''}"
    named = [(one, made.token_to_id(one)) for one in (BEGIN, END)]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return made


def byte_level(*, prefix=False):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("a", "b"), ("Ċ", "Ċ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    return made


def trimmed():
    """As Llama 3's: runs of blanks are tokens, and spaces are no part of a token's offsets."""
    made = byte_level()
    model = json.loads(made.to_str())["model"]
    merges = [*map(tuple, model["merges"]), ("Ġ", "Ġ"), ("Ċ", "Ġ"), ("ĊĠ", "Ġ"), (":", "Ċ")]
    vocab = model["vocab"]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    cut = pre_tokenizers.Split(tokenizers.Regex(r" ?[^\s]+[\r\n]*|\s+(?!\S)|\s+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    made.decoder = decoders.ByteLevel()
    framed(made)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), made.post_processor])
    return made


def pieces(*, byte_fallback=True):
    names = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "t",
        "h",
        "e",
        ".",
        "?",
        ":",
        "1",
        "x",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "b"), ("▁", "a"), ("▁", "▁"), (".", "▁")]
    names += [left + right for left, right in merges]
    vocab = {name: number for number, name in enumerate(names)}
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=byte_fallback))


def metaspace(scheme):
    made = pieces()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return made


def prepended():
    """As Llama 2 is kept: a normalizer writes the first space."""
    made = pieces()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def gemma():
    made = pieces()
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


def unigram():
    vocab = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -1.0),
        ("a", -3.0),
        ("b", -3.0),
        ("ab", -2.5),
        ("▁a", -2.2),
        (".", -4.0),
    ]
    made = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    return made


MAKES = {
    "byte level": framed(byte_level(), begins=False),
    "byte level, prefix space": framed(byte_level(prefix=True), begins=False),
    "byte level with a first token": framed(byte_level()),
    "byte level, trimmed offsets": trimmed(),
    "metaspace first": framed(metaspace("first")),
    "metaspace always": framed(metaspace("always")),
    "metaspace never": framed(metaspace("never")),
    "prepend, byte fallback": framed(prepended()),
    "gemma": framed(gemma()),
    "unigram": framed(unigram(), begins=False),
    "first and last token": framed(gemma(), ends=True),
    "last token": framed(unigram(), begins=False, ends=True),
}
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join)


def opened(name):
    return wrap_backend(tokenizers.Tokenizer.from_str(MAKES[name].to_str()), END, name)


def theirs(name):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(MAKES[name].to_str()), eos_token=END)


@pytest.mark.parametrize("name", MAKES)
def test_documents_and_prompts_begin_as_the_tokenizer_begins_a_text_and_prompts_do_not_end(name):
    ours, there = opened(name), theirs(name)
    text = "the ab. the"
    as_there = there(text).input_ids
    if as_there[-1:] == [ours.eos_id]:
        as_there = as_there[:-1]

    (document,) = Encoder(ours, 0).encode_batch([text])

    assert ours.encode_prompt(text) == document.tolist() == as_there


@pytest.mark.parametrize("name", MAKES)
@given(prompt=TEXTS, answer=TEXTS)
def test_two_texts_have_the_ids_of_the_whole_and_part_where_the_prompt_ends(name, prompt, answer):
    ours, there = opened(name), theirs(name)
    try:
        ids, border = ours.encode_pair(prompt, answer)
    except DataError:
        # white space alone may be no token
        assert not answer.strip()
        return
    bare = there(prompt + answer, add_special_tokens=False)
    first = len(ours.first_ids)

    assert ids[first:] == bare.input_ids
    plain = tokenizers.Tokenizer.from_str(MAKES[name].to_str())
    # without what trims spaces off them
    plain.post_processor = processors.TemplateProcessing(single="$A")
    offsets = plain.encode(prompt + answer, add_special_tokens=False).offsets
    assert all(stop <= len(prompt) for _, stop in offsets[: border - first])
    assert offsets[border - first][1] > len(prompt)


def test_what_is_prepared_before_is_not_taken_for_what_begins_otherwise(tmp_path):
    paths = []
    for name in ("metaspace never", "gemma"):
        made = tokenizers.Tokenizer.from_str(MAKES[name].to_str())
        for number, frame in enumerate((made.post_processor, processors.ByteLevel())):
            made.post_processor = frame
            paths.append(tmp_path / f"{name}-{number}.json")
            made.save(str(paths[-1]))
    found = [fingerprint_tokenizer(FileTokenizerConfig(path=path, eos_token=END), None) for path in paths]

    assert len(set(found)) == 4
    assert load_tokenizer(FileTokenizerConfig(path=paths[1], eos_token=END), None).first_ids == ()


@pytest.mark.parametrize(
    ("name", "said", "told"), [("byte level", True, "writes no first token"), ("gemma", False, "writes one")]
)
def test_a_check_tells_where_a_base_model_may_have_been_trained_otherwise(tmp_path, name, said, told):
    MAKES[name].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "add_bos_token": said}))

    check = check_tokenizer(tmp_path)

    assert check.facts["texts_begin_with"] == (BEGIN if name == "gemma" else None)
    assert any(told in line for line in check.refused)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "add_bos_token": not said}))
    assert not any("add_bos_token" in line for line in check_tokenizer(tmp_path).refused)
    assert load_tokenizer(ModelTokenizerConfig(), tmp_path).eos_id == MAKES[name].token_to_id(END)


PAIRED = [
    ("the ab", ". the"),
    ("the", " the"),
    ("the ", "ab"),
    ("a", "b"),
    ("x:", "\n  x"),
    ("the\n", "  ab"),
    ("the caf e", "\u0301"),
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A tiny model with the tokenizer of a make, written once for each."""
    config = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1}
    made = {}

    def make(name):
        if name not in made:
            cache = tmp_path_factory.mktemp("models")
            path = write_random_model(parse_hub_config(config, "tiny"), 1, cache, None)
            MAKES[name].save(str(path / "tokenizer.json"))
            named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
            (path / "tokenizer_config.json").write_text(json.dumps(named))
            made[name] = path
        return made[name]

    return make


@pytest.mark.parametrize("name", MAKES)
def test_an_ending_is_as_likely_as_the_tokens_of_the_whole_that_reach_beyond_the_prompt(model_of, name):
    path = model_of(name)
    model, plain = TextModel(path), AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = theirs(name)
    first = list(opened(name).first_ids)
    for prompt, ending in PAIRED:
        bare = tokenizer(prompt + ending, add_special_tokens=False, return_offsets_mapping=True)
        ids = [*first, *bare.input_ids]
        # without the post-processor, which trims spaces off offsets
        backend = tokenizers.Tokenizer.from_str(MAKES[name].to_str())
        backend.post_processor = processors.TemplateProcessing(single="$A")
        spans = backend.encode(prompt + ending, add_special_tokens=False).offsets
        border = len(first) + sum(stop <= len(prompt) for _, stop in spans)
        if ending == "\u0301":
            # a normalizer makes one letter of both, of which offsets name the first alone
            alone = [*first, *tokenizer(prompt, add_special_tokens=False).input_ids]
            parts = (at for at, (one, other) in enumerate(zip(alone, ids, strict=False)) if one != other)
            border = next(parts, len(alone))
        if border == len(ids):
            # one unknown token, whatever letter it is of
            continue
        if not border:
            with pytest.raises(DataError, match="no token before it"):
                model.log_probs(prompt, [ending])
            continue
        with torch.no_grad():
            said = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(said[at - 1, ids[at]]) for at in range(border, len(ids)))

        (found,) = model.log_probs(prompt, [ending])
        (of_tokens,) = model.log_probs(model.encode_prompt(prompt), [ending])

        assert found == pytest.approx(expected, abs=1e-4), (prompt, ending)
        if tokenizer.decode(tokenizer(prompt, add_special_tokens=False).input_ids) == prompt:
            assert of_tokens == pytest.approx(expected, abs=1e-4), (prompt, ending)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("tokens", [64, 5])
def test_labelled_texts_are_read_as_transformers_reads_them(name, tokens):
    texts = ["the ab. the", "x", "the the the ab ab 12 é"]

    rows = encode_rows([Example(text, number) for number, text in enumerate(texts)], opened(name), tokens)

    for number, text in enumerate(texts):
        expected = theirs(name)(text, truncation=True, max_length=tokens).input_ids
        end = int((rows.labels[number] != -100).nonzero()[0])
        assert rows.ids[number, : end + 1].tolist() == expected
        assert int(rows.labels[number, end]) == number


@pytest.mark.parametrize("name", ["gemma", "byte level, trimmed offsets", "prepend, byte fallback", "metaspace first"])
def test_prompts_of_samples_begin_as_documents_do(tmp_path, name):
    path = tmp_path / "tokenizer.json"
    MAKES[name].save(str(path))

    sampler = TextSampler(SamplesConfig(prompts=("the ab",), tokens=1), path, Continuation(1, 8, 300, 0))

    assert sampler._prompts["the ab"] == theirs(name)("the ab").input_ids


def test_a_run_says_with_which_token_its_pairs_begin(tmp_path):
    MAKES["gemma"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    pair = {"prompt": "the ab", "chosen": " the", "rejected": " ab"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    source = PreferenceSource(path=tmp_path / "pairs.jsonl")
    settings = {"preferences": PreferencesConfig(sources=(source,)), "tokenizer": ModelTokenizerConfig()}
    data = DataConfig(**settings, sequence_length=32, validation_share=0.0)
    said = []

    prepare_preferences(data, tmp_path / "cache", 0, tmp_path, said.append)

    assert said == [f"data: prompts of text begin with {BEGIN}, as the tokenizer's texts do"]
