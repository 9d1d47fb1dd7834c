"""A model with an encoder answers a prompt with the tokens of transformers; without a decoder it is refused."""

import pytest
import torch
from test_text_model import GREEDY, SEEDED, WORDS
from test_text_model import directory as decoder  # noqa: F401 - a fixture
from transformers import AutoModelForSeq2SeqLM

import phalanx
from phalanx.errors import ModelError
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.serve import TextModel

T5 = {
    "model_type": "t5",
    "vocab_size": 7,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
BERT = {"model_type": "bert", "vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def with_words(config, decoder, cache):  # noqa: F811
    found = write_random_model(parse_hub_config(config, "tiny"), 4, cache, None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found / name).write_bytes((decoder / name).read_bytes())
    return found


@pytest.fixture(scope="module")
def directory(decoder, tmp_path_factory):  # noqa: F811
    return with_words(T5, decoder, tmp_path_factory.mktemp("t5"))


@pytest.mark.parametrize("prompt", ["the owner holds", "both"])
def test_the_likeliest_tokens_are_those_of_transformers_generate_and_of_no_cache(directory, prompt):
    model, plain = TextModel(directory), AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    ids = model.encode_prompt(prompt)

    found = model.complete_prompt(ids, GREEDY)

    generated = plain.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=GREEDY.max_new_tokens)[0, 1:]
    row = likeliest(plain, ids)
    assert generated.tolist() == row[1:]
    assert found.text == model._tokenizer.decode(row[1:], skip_special_tokens=True)
    assert (found.prompt_tokens, found.tokens) == (len(ids), len(row) - 1)
    assert found.finish == ("stop" if row[-1] == 1 else "length")
    # in a batch, behind a longer one
    assert found == model.complete_batch([[*ids, 2, 3], ids], GREEDY)[1]


def likeliest(plain, ids):
    """The decoder's row by the whole model alone, without a cache."""
    row = [0]
    while len(row) <= GREEDY.max_new_tokens and row[-1] != 1:
        logits = plain(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([row]), use_cache=False).logits
        row.append(int(logits[0, -1].argmax()))
    return row


# of these transformers makes a cache that is too short
def test_a_decoder_of_more_layers_than_its_encoder_writes_too(decoder, tmp_path):  # noqa: F811
    directory = with_words(T5 | {"num_decoder_layers": 3}, decoder, tmp_path)
    model, plain = TextModel(directory), AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    ids = model.encode_prompt("the owner holds")

    row = likeliest(plain, ids)

    assert model.complete_prompt(ids, GREEDY).text == model._tokenizer.decode(row[1:], skip_special_tokens=True)


def test_pieces_of_a_drawn_text_are_the_text_and_hold_nothing_of_the_prompt(directory):
    model = TextModel(directory)

    with model.stream_text(model.encode_prompt("the owner holds both ends"), SEEDED) as stream:
        pieces = list(stream)

    assert "".join(pieces) == stream.completion.text
    assert stream.completion == model.complete_prompt(model.encode_prompt("the owner holds both ends"), SEEDED)
    assert phalanx.generate(directory, "the owner holds both ends", SEEDED.model_dump()) == stream.completion.text


def test_an_answer_is_as_likely_as_the_decoder_says(directory):
    model, plain = TextModel(directory), AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    ids, answer = model.encode_prompt("the owner"), [WORDS.index("holds"), WORDS.index("ends")]

    (found,) = model.log_probs(ids, ["holds ends"])

    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([[0, answer[0]]])).logits[0]
    expected = torch.log_softmax(logits, -1)[[0, 1], answer].sum()
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_an_encoder_alone_and_an_encoder_in_stages_are_refused_by_name(directory, decoder, tmp_path):  # noqa: F811
    with pytest.raises(ModelError, match="bert is an encoder, and texts are written by decoders alone"):
        TextModel(with_words(BERT, decoder, tmp_path))
    with pytest.raises(ModelError, match="--stages 2: t5 has an encoder"):
        TextModel(directory, stages=2)
