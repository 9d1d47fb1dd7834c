"""What a model makes of a text: figures by hand, hostile characters, and the documents that it was trained on."""

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.nn import functional

from phalanx.data.shards import open_dataset
from phalanx.errors import DataError, ModelError
from phalanx.interpret.documents import find_nearest
from phalanx.interpret.page import colour_losses, write_documents, write_layers, write_losses
from phalanx.interpret.tokens import MAX_TOKENS, TokenLoss, layer_guesses, token_losses
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.serve import TextModel
from tiny_dataset import write_tiny_dataset

TEXTS = [
    *(f"the cat number {number} sits on the mat and looks at the bird" for number in range(12)),
    *(f"def function_{number}(x): return x * {number} + 1" for number in range(12)),
]
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.3,
    },
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    home = tmp_path_factory.mktemp("dataset")
    write_tiny_dataset(home, {"cats": TEXTS[:12], "code": TEXTS[12:]})
    return open_dataset(home)


def open_random(kind, dataset, cache):
    config = {**CONFIGS[kind], "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    home = write_random_model(parse_hub_config(config, "tiny"), 1, cache, None)
    (home / "tokenizer.json").write_bytes((dataset.directory / "tokenizer.json").read_bytes())
    (home / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return TextModel(home)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request, dataset, tmp_path_factory):
    return open_random(request.param, dataset, tmp_path_factory.mktemp(request.param))


def ids_of(model, text):
    return torch.tensor([model.tokenizer(text, add_special_tokens=False).input_ids])


def test_losses_are_those_of_the_model_and_their_mean_that_of_transformers(model):
    text = TEXTS[0]
    ids = ids_of(model, text)

    rows = token_losses(model, text)

    with torch.no_grad():
        expected = float(model.module(input_ids=ids, labels=ids).loss)
    assert "".join(row.text for row in rows) == text
    assert rows[0].loss is None
    assert sum(row.loss for row in rows[1:]) / (len(rows) - 1) == pytest.approx(expected, abs=1e-5)
    assert all((row.rank == 0) == (row.likeliest == row.text) for row in rows[1:] if row.rank == 0)


def test_a_text_beyond_the_window_has_a_loss_at_every_token_and_each_sees_half_a_window(model):
    text = " ".join(TEXTS[:8])
    ids = ids_of(model, text)[0]
    assert len(ids) > 2 * model.context_length

    rows = token_losses(model, text)

    assert len(rows) == len(ids) and all(row.loss is not None for row in rows[1:])
    # the first window has what a text of its length has
    short = token_losses(model, model.tokenizer.decode(ids[:20]))
    assert [row.loss for row in rows[1:15]] == pytest.approx([row.loss for row in short[1:15]], abs=1e-5)
    # by hand: the last token, from the window that ends the text
    start = math.ceil((len(ids) - model.context_length) / (model.context_length // 2)) * (model.context_length // 2)
    with torch.no_grad():
        scores = model.module(input_ids=ids[None, start:]).logits[0, -2].log_softmax(-1)
    assert rows[-1].loss == pytest.approx(-float(scores[ids[-1]]), abs=1e-5)


@pytest.mark.parametrize("text", ["", "a", "word " * (MAX_TOKENS + 10)])
def test_a_text_of_too_few_or_too_many_tokens_is_refused(model, text):
    with pytest.raises(DataError, match="expected 2 to"):
        token_losses(model, text)


def test_a_model_whose_logits_are_no_numbers_is_refused(dataset, tmp_path):
    broken = open_random("gpt2", dataset, tmp_path)
    with torch.no_grad():
        next(iter(broken.module.base_model.children())).weight.fill_(math.nan)

    for look in (token_losses, layer_guesses):
        with pytest.raises(ModelError, match="no finite number"):
            look(broken, "the cat")


def test_the_lens_is_norm_and_head_on_each_layer_and_ends_with_the_model_itself(model):
    prompt = "the cat number"
    before = model.module.config._attn_implementation

    guesses = layer_guesses(model, prompt, 300)

    with torch.no_grad():
        output = model.module(input_ids=ids_of(model, prompt), output_hidden_states=True)
    trunk = model.module.base_model
    norm = trunk.ln_f if hasattr(trunk, "ln_f") else trunk.norm
    assert [guess.layer for guess in guesses] == [0, 1, 2, 3]
    for guess in guesses[:-1]:
        with torch.no_grad():
            logits = model.module.get_output_embeddings()(norm(output.hidden_states[guess.layer][0, -1]))
        shares = sorted(logits.softmax(-1).tolist(), reverse=True)
        assert [share for _, share in guess.tokens] == pytest.approx(shares, abs=1e-5)
    own = sorted(output.logits[0, -1].softmax(-1).tolist(), reverse=True)
    assert [share for _, share in guesses[-1].tokens] == pytest.approx(own, abs=1e-5)
    assert guesses[-1].divergence == 0.0 and guesses[0].divergence > 0.0
    assert model.module.config._attn_implementation == before


def test_attention_of_the_last_token_is_a_share_of_all_tokens(model):
    guesses = layer_guesses(model, "the cat number")

    assert guesses[0].attention == ()
    for guess in guesses[1:]:
        assert len(guess.attention) == ids_of(model, "the cat number").shape[1]
        assert sum(guess.attention) == pytest.approx(1.0, abs=1e-5)


def test_a_prompt_beyond_the_window_is_refused(model):
    with pytest.raises(DataError, match="window"):
        layer_guesses(model, " ".join(TEXTS[:8]))


def test_a_document_is_nearest_to_itself_and_comes_with_source_and_licence(model, dataset):
    near = find_nearest(model, TEXTS[13], dataset, num_shown=4, num_candidates=8)

    assert near[0].name == "code/1"
    assert near[0].gradient > near[1].gradient
    assert all(row.name.startswith("code/") for row in near)
    assert (near[0].source, near[0].licence) == ("made", "")
    assert not any(parameter.grad is not None for parameter in model.module.parameters())


def test_gradients_are_those_of_the_last_block(model, dataset):
    near = find_nearest(model, TEXTS[13], dataset, num_shown=19, num_candidates=19)
    blocks = next(part for part in model.module.base_model.modules() if isinstance(part, torch.nn.ModuleList))

    def gradient(ids):
        loss = functional.cross_entropy(model.module(input_ids=ids).logits[0, :-1], ids[0, 1:])
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(blocks[-1].parameters()))])

    row = next(row for row in near if row.name == "cats/3")
    # a document of a dataset ends with the end of text
    ids = torch.cat([ids_of(model, TEXTS[3]), torch.tensor([[0]])], dim=1)
    expected = functional.cosine_similarity(gradient(ids_of(model, TEXTS[13])), gradient(ids), dim=0)
    assert row.gradient == pytest.approx(float(expected), abs=1e-4)


def test_held_out_documents_are_not_among_them_and_a_bound_spreads_over_all(model, dataset):
    names = {row.name for row in find_nearest(model, TEXTS[4], dataset, num_shown=50, num_candidates=50)}
    some = find_nearest(model, TEXTS[4], dataset, num_shown=50, num_candidates=50, max_documents=4)

    assert "cats/4" not in names and len(names) == 20
    assert {row.name.partition("/")[0] for row in some} == {"cats", "code"} and len(some) == 4


HOSTILE = "\x1b[2J\u202e<script>alert(1)</script>\x07"


def test_no_character_of_a_text_steers_the_terminal_or_the_page(tmp_path, model, dataset):
    rows = [TokenLoss(HOSTILE, None, None, ""), TokenLoss(HOSTILE, 9.0, 3, HOSTILE)]
    shown = io.StringIO()

    Console(file=shown, force_terminal=True, color_system="truecolor").print(colour_losses(rows))
    page = write_losses(rows, HOSTILE, tmp_path / "loss.html").read_text()
    guesses = [replace(guess, tokens=((HOSTILE, 0.5),)) for guess in layer_guesses(model, "the cat")]
    layers = write_layers([HOSTILE], guesses, HOSTILE, tmp_path / "layers.html").read_text()
    near = [replace(row, beginning=HOSTILE, name=HOSTILE) for row in find_nearest(model, TEXTS[0], dataset)]
    documents = write_documents(near, HOSTILE, tmp_path / "documents.html").read_text()

    assert "\x1b[2J" not in shown.getvalue() and "\x07" not in shown.getvalue() and "\u202e" not in shown.getvalue()
    for text in (page, layers, documents):
        assert "<script>" not in text and "\x1b" not in text and "\u202e" not in text
        assert "default-src &#x27;none&#x27;" in text
