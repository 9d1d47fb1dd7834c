"""A model writes what transformers writes, the same for one seed, and says what stands in the way."""

import json
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import phalanx
from phalanx.data.chat import ChatMessage
from phalanx.errors import ConfigError, DataError, ModelError
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.models.weights import check_claims
from phalanx.redteam.generation import greedy_answers
from phalanx.serve import SamplingRule, TextModel, complete_file, open_text_model

WORDS = ["<unk>", "<end>", "the", "owner", "holds", "both", "ends"]
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 7,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
GREEDY = SamplingRule(max_new_tokens=6, temperature=0.0)
SEEDED = SamplingRule(max_new_tokens=8, temperature=1.5, top_p=1.0, seed=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model of the hub's layout with a tokenizer and a chat template."""
    cache = tmp_path_factory.mktemp("models")
    found = write_random_model(parse_hub_config(CONFIG, "tiny"), 1, cache, None)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<unk>", "<end>"])
    words.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"})
    )
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def model(directory):
    return TextModel(directory)


def changed(directory, tmp_path, **files):
    """A copy of the model with other files."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (copy / name.replace("__", ".")).write_text(content)
    return copy


def deafen(tokenizer):
    """Read every text as the same words, by the same vocabulary."""
    pattern = {"type": "Replace", "pattern": {"Regex": ".+"}, "content": "the owner"}
    return {**tokenizer, "normalizer": pattern}


SWAPS = {
    "config": ("config.json", lambda config: {**config, "layer_norm_epsilon": 0.5}),
    "tokenizer": ("tokenizer.json", deafen),
    "ends": ("generation_config.json", lambda ends: {**ends, "eos_token_id": [1, 3]}),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_digest_is_of_all_that_decides_an_answer(directory, model, tmp_path, swap):
    """Figures that were measured on the same weights beside another tokenizer or config are of another model."""
    copy, (name, change) = tmp_path / "copy", SWAPS[swap]
    shutil.copytree(directory, copy)
    used = TextModel(copy)
    used.tokenizer("the owner holds", truncation=True, max_length=2)
    assert used.model_digest == model.model_digest

    before = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps(change(before)))

    assert TextModel(copy).model_digest != model.model_digest


def test_the_likeliest_tokens_are_those_of_transformers_without_a_cache(directory, model):
    ids = model.encode_prompt("the owner holds")

    found = model.complete_prompt(ids, GREEDY)

    plain, row = AutoModelForCausalLM.from_pretrained(directory), list(ids)
    for _ in range(GREEDY.max_new_tokens):
        row.append(int(plain(torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] == 1:
            break
    expected = [WORDS[token] for token in row[len(ids) :] if token > 1]
    assert [word for word in found.text.split() if word != "<unk>"] == expected
    assert (found.prompt_tokens, found.tokens) == (3, len(row) - len(ids))
    assert found.finish == ("stop" if row[-1] == 1 else "length")


@pytest.mark.parametrize(
    "defaults",
    [{"repetition_penalty": 9.0}, {"num_beams": 3}, {"suppress_tokens": [2, 3]}, {"no_repeat_ngram_size": 1}],
)
def test_defaults_of_a_models_maker_decide_no_text(directory, model, tmp_path, defaults):
    """Attacker: who made the model, whose planted or learned words the red team then does not see."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 1, **defaults}))
    other, ids = TextModel(copy), model.encode_prompt("the owner holds")

    assert other.model_digest == model.model_digest
    for rule in (GREEDY, SEEDED):
        assert other.complete_prompt(ids, rule) == model.complete_prompt(ids, rule)
    assert greedy_answers(other, [ids], 6) == greedy_answers(model, [ids], 6)


def test_one_seed_writes_one_text_and_leaves_the_draws_of_others_alone(model):
    ids = model.encode_prompt("the owner")
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)

    texts = [
        model.complete_prompt(ids, SEEDED.model_copy(update={"seed": seed})).text for seed in (3, 3, *range(4, 12))
    ]

    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert torch.equal(torch.rand(3), undisturbed)


def test_the_pieces_of_a_stream_are_the_text(model):
    ids = model.encode_prompt("both ends")

    with model.stream_text(ids, SEEDED) as stream:
        pieces = list(stream)

    assert "".join(pieces) == stream.completion.text == model.complete_prompt(ids, SEEDED).text


def test_a_stream_that_is_left_stops_writing(model):
    with model.stream_text(model.encode_prompt("the"), SEEDED) as stream:
        pass

    assert not stream._writer.is_alive()


def test_a_full_window_ends_a_text(model):
    found = model.complete_prompt([2] * 14, SamplingRule(max_new_tokens=100, temperature=2.0, top_p=1.0, seed=1))

    assert found.tokens <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no token"),
        ("the " * 16, "has 16 tokens, the model's window"),
        ("caf\udce9", "prompt: holds a lone surrogate, or a byte that is not UTF-8"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(model, text, message):
    with pytest.raises(DataError, match=message):
        model.encode_prompt(text)


def test_a_chat_is_rendered_by_the_models_template(model):
    said = [ChatMessage(role="user", content="the owner"), ChatMessage(role="assistant", content="holds")]

    assert model.chat_prompt([*said, ChatMessage(role="user", content="both")]) == [2, 3, 4, 5]
    with pytest.raises(DataError, match="the last of which is not the assistant's"):
        model.chat_prompt(said)
    with pytest.raises(DataError, match="at least one"):
        model.chat_prompt([])


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", DataError, "roles must alternate"),
        ("{% for m in %}", ModelError, "is not a usable template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ModelError, "what no template may"),
    ],
    ids=["refuses the messages", "is broken", "attacks the sandbox"],
)
def test_a_template_that_does_not_render_is_named(directory, tmp_path, template, error, message):
    model = TextModel(changed(directory, tmp_path, chat_template__jinja=template))

    with pytest.raises(error, match=message):
        model.chat_prompt([ChatMessage(role="user", content="the")])


def test_a_tokenizer_of_another_model_is_refused(directory, tmp_path):
    copy = changed(directory, tmp_path)
    larger = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    larger.add_tokens([f"word{number}" for number in range(20)])
    larger.save(str(copy / "tokenizer.json"))

    with pytest.raises(ModelError, match="27 tokens, the model embeddings for 7"):
        TextModel(copy)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"vocab_size": 2**40}, r"config\.json: claims [0-9]+ numbers; the safetensors beside it hold 6[0-9]+"),
        ({"n_layer": 3}, r"config\.json: claims [0-9]+ numbers; the safetensors beside it hold 6[0-9]+"),
        ({"n_layer": 2000}, r"config\.json: claims 2000 layers; the safetensors beside it hold 28 tensors"),
        ({"vocab_size": 2**40, "quantization_config": {}}, r"config\.json: claims [0-9]+ numbers"),
        ({"n_embd": "x"}, "transformers cannot build it|no model that can write texts"),
    ],
)
def test_a_config_that_claims_more_than_the_files_hold_takes_no_memory(directory, tmp_path, claims, message):
    """transformers took the memory first, and drew the layers that the files lack."""
    copy = changed(directory, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | claims))

    with pytest.raises(ModelError, match=message):
        TextModel(copy)


def test_a_tensor_under_another_name_is_not_drawn(directory, tmp_path):
    """As many numbers as the config claims, one of them of no use."""
    copy = changed(directory, tmp_path)
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("h.0.mlp.c_fc.weight"))
    weights["of_no_use"] = weights.pop(name)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match=r"lacks the tensors transformer\.h\.0\.mlp\.c_fc\.weight"):
        TextModel(copy)


def test_damaged_weights_are_named_and_write_nothing(directory):
    model = TextModel(directory)
    with torch.no_grad():
        model._model.transformer.ln_f.weight.fill_(float("nan"))

    with pytest.raises(ModelError, match="no finite number"):
        model.complete_prompt([2], GREEDY)


def test_a_place_without_a_model_is_refused(tmp_path, directory):
    with pytest.raises(ModelError, match="neither a run"):
        open_text_model(tmp_path)
    with pytest.raises(ModelError, match="no checkpoints"):
        open_text_model(directory, step=3)


def test_a_table_that_no_file_holds_and_a_config_claims_is_refused(tmp_path):
    """GPT-Neo has a square of its window in each layer: of a small file there would be gigabytes."""
    config = {"model_type": "gpt_neo", "hidden_size": 4, "num_layers": 2, "num_heads": 1, "vocab_size": 10}
    config |= {"attention_types": [[["global"], 2]], "max_position_embeddings": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    check_claims(tmp_path, AutoModelForCausalLM)
    weights = load_file(tmp_path / "model.safetensors") | {"transformer.wpe.weight": torch.zeros(60_000, 4)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 60_000}
    (tmp_path / "config.json").write_text(json.dumps(written))

    with pytest.raises(ModelError, match=r"config\.json: claims tables of 7200000000 bytes"):
        check_claims(tmp_path, AutoModelForCausalLM)


class TestFiles:
    @pytest.fixture
    def lines(self, tmp_path):
        path = tmp_path / "prompts.jsonl"
        chat = {"messages": [{"role": "user", "content": "the owner"}]}
        path.write_text("".join(json.dumps(one) + "\n" for one in ({"prompt": "the"}, chat, {"prompt": "both ends"})))
        return path

    def test_each_line_is_completed_and_an_interrupted_file_goes_on_as_it_would_have(self, model, lines, tmp_path):
        whole, cut, told = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl", []
        complete_file(model, lines, whole, SEEDED, lambda at, of: told.append((at, of)))
        content = whole.read_bytes()
        cut.write_bytes(content[: content.index(b"\n") + 9])

        assert complete_file(model, lines, cut, SEEDED, lambda at, of: None) == 2

        assert cut.read_bytes() == content
        assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
        assert json.loads(content.splitlines()[2])["prompt"] == "both ends"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 4: is not JSON"),
            ("{}", "line 4: expected either prompt or messages"),
            ('{"messages": [{"role": "king", "content": "x"}]}', "line 4: turn 1: has the role"),
            ('{"prompt": ""}', "line 4: prompt: has no token"),
            ('{"prompt": "the", "finish": "never"}', "line 4: has finish, which the result would replace"),
            (r'{"prompt": "the", "id": "\ud800"}', "line 4: cannot be written again"),
            ('{"prompt": "the", "id": NaN}', "line 4: cannot be written again"),
        ],
    )
    def test_a_mistake_in_the_last_line_is_told_before_the_first_text(self, model, lines, tmp_path, line, message):
        lines.write_text(lines.read_text() + line + "\n")

        with pytest.raises(DataError, match=message):
            complete_file(model, lines, tmp_path / "out.jsonl", GREEDY, lambda at, of: None)

        assert not (tmp_path / "out.jsonl").exists()

    def test_a_line_ends_at_its_newline_alone(self, model, tmp_path):
        """U+0085, U+2028 and U+2029 stand in JSON as they are, and in texts that were copied from pages."""
        rows = [{"prompt": f"the {end} owner"} for end in ("\x85", "\u2028", "\u2029")]
        lines, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        lines.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")

        assert complete_file(model, lines, out, GREEDY, lambda at, of: None) == 3

        written = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert [row["prompt"] for row in written] == [row["prompt"] for row in rows]

    def test_the_texts_of_another_input_are_not_continued(self, model, lines, tmp_path):
        out = tmp_path / "out.jsonl"
        out.write_text('{"prompt": "another", "text": "x"}\n')

        with pytest.raises(DataError, match="line 1: is of another input"):
            complete_file(model, lines, out, GREEDY, lambda at, of: None)


def test_one_call_of_the_package_writes_as_the_model_does(directory, model):
    expected = model.complete_prompt(model.encode_prompt("the owner"), GREEDY).text
    sampling = {"max_new_tokens": 6, "temperature": 0.0}

    assert phalanx.generate(directory, "the owner", sampling) == expected
    assert phalanx.generate(model, "the owner", sampling) == expected
    answer = model.complete_prompt(model.chat_prompt([ChatMessage(role="user", content="the owner")]), GREEDY).text
    assert phalanx.generate(model, [{"role": "user", "content": "the owner"}], sampling) == answer


@pytest.mark.parametrize(
    ("prompt", "sampling", "told"),
    [
        ("the", {"temperatur": 0.0}, "generate: temperatur: Extra inputs"),
        ("the", {"temperature": -1.0}, "generate: temperature: Input should be greater"),
        ([{"role": "boss", "content": "the"}], {}, "generate: role: Input should be"),
    ],
)
def test_a_call_with_what_there_is_not_is_refused(model, prompt, sampling, told):
    with pytest.raises(ConfigError, match=told):
        phalanx.generate(model, prompt, sampling)


def test_a_batch_writes_what_each_prompt_alone_does(model):
    prompts = [model.encode_prompt(text) for text in ("the owner holds", "the", "both ends the owner")]

    found = model.complete_batch(prompts, GREEDY)

    assert found == [model.complete_prompt(ids, GREEDY) for ids in prompts]
    # drawn by one seed, in the order of the batch
    assert model.complete_batch(prompts, SEEDED) == model.complete_batch(prompts, SEEDED)


def test_the_log_probability_of_an_ending_is_that_of_all_its_tokens(directory, model):
    ids = model.encode_prompt("the owner")

    both, one = model.log_probs(ids, ["holds both", "ends"])

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[*ids, 4, 5]]))
    plain = whole.logits[0].log_softmax(-1)
    assert both == pytest.approx(float(plain[1, 4] + plain[2, 5]), abs=1e-5)
    assert one == pytest.approx(float(plain[1, 6]), abs=1e-5)
    with pytest.raises(DataError, match="has 0 tokens"):
        model.log_probs(ids, [""])
    with pytest.raises(DataError, match="the prompt leaves 1"):
        model.log_probs(model.encode_prompt("the " * 15), ["holds both"])


def test_a_prompt_in_tokens_and_the_same_as_text_make_an_ending_as_likely(model):
    endings = [" holds both", " ends"]

    assert model.log_probs("the owner", endings) == model.log_probs(model.encode_prompt("the owner"), endings)
    # a vocabulary of whole words: written together, they are an unknown one
    assert model.log_probs("the owner", ["ends"]) != model.log_probs(model.encode_prompt("the owner"), ["ends"])
