"""An exported directory is the hub's layout: other tools find model class, special tokens, template and defaults."""

import json

import gguf
import pytest
import tokenizers
import torch
from planned_models import PLANNED
from safetensors import safe_open
from tiny_models import ARCHITECTURES, Held, build_all, chain, some_ids, whole_model, without_dropout
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from phalanx.checkpoint.export import RunTokenizer, export_model
from phalanx.data import ModelTokenizerConfig
from phalanx.data.tokenizers import load_tokenizer
from phalanx.errors import ModelError
from phalanx.models import FAMILIES, LoraConfig, ModelConfig, ModelSource, open_model, parse_hub_config
from phalanx.models.hub_files import architecture_of, with_older_keys
from phalanx.models.source import write_random_model

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
ARCHITECTURE_NAMES = {
    "arcee": "ARCEE",
    "bloom": "BLOOM",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "ernie4_5": "ERNIE4_5",
    "exaone4": "EXAONE4",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX",
    "granite": "GRANITE",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "olmo": "OLMO",
    "olmo2": "OLMO2",
    "phi": "PHI2",
    "phi3": "PHI3",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "seed_oss": "SEED_OSS",
    "smollm3": "SMOLLM3",
    "starcoder2": "STARCODER2",
}
"""The name that the gguf package has for what a family becomes in llama.cpp; it has none for the others."""

VLLM = (
    "ArceeForCausalLM BertForMaskedLM BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM Ernie4_5ForCausalLM "
    "Exaone4ForCausalLM FalconForCausalLM FlexOlmoForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM Gemma2ForCausalLM "
    "Gemma3ForCausalLM GemmaForCausalLM GlmForCausalLM GraniteForCausalLM LlamaForCausalLM MistralForCausalLM "
    "MixtralForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM "
    "Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "SeedOssForCausalLM SmolLM3ForCausalLM Starcoder2ForCausalLM"
)
"""Architectures of our families that vLLM 0.33.0 has: ``model_executor/models/registry.py`` of its wheel."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def model_of(name, cache, **changes):
    config = (PLANNED[name] if name in PLANNED else without_dropout(ARCHITECTURES[name])) | changes
    return write_random_model(parse_hub_config(config, name), 3, cache, None)


def small_tokenizer():
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "<end>", "<pad>", "hello", "world", "you"])}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.add_special_tokens(["<unk>", "<s>", "<end>", "<pad>"])
    return found


@pytest.fixture
def chat(cache, tmp_path):
    """A model directory as the hub has a chat model: template, special tokens, defaults of generation."""
    directory = tmp_path / "Chat-1M"
    model = whole_model(ModelSource(model_of("qwen3", cache)))
    model.save_pretrained(directory)
    small_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "model_max_length": 64,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    defaults = {"eos_token_id": [2, 3], "bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return ModelSource(directory)


def trained_copy(source):
    """A checkpoint with the model's own weights."""
    return Held(build_all(source, 2))


def tokenizer_of(source, eos_id=2):
    return RunTokenizer(source.tokenizer_path, eos_id, of_model=True)


def test_template_special_tokens_and_defaults_of_a_chat_model_are_kept(chat, tmp_path):
    out = tmp_path / "out"

    export_model(trained_copy(chat), chat, out, adapter=None, tokenizer=tokenizer_of(chat))

    given, found = (AutoTokenizer.from_pretrained(one, local_files_only=True) for one in (chat.directory, out))
    said = [{"role": "user", "content": "hello world"}]
    assert found.special_tokens_map == given.special_tokens_map
    assert (found.padding_side, found.model_max_length) == ("left", 64)
    assert found.chat_template == given.chat_template == TEMPLATE
    assert found.apply_chat_template(said, tokenize=False) == "<|user|>hello world<end>"
    assert found("hello you").input_ids == given("hello you").input_ids
    defaults = GenerationConfig.from_pretrained(out, local_files_only=True)
    assert (defaults.eos_token_id, defaults.temperature, defaults.top_p) == ([2, 3], 0.6, 0.9)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    ids = some_ids()
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(out, local_files_only=True)(ids).logits,
        chain(build_all(chat, 3), ids),
    )


@pytest.mark.parametrize("end_of_turn", [None, 3])
def test_a_reward_model_whose_texts_are_padded_with_their_end_is_exported_without_padding(chat, tmp_path, end_of_turn):
    end = end_of_turn or 2
    chat.hub_config.pad_token_id = end
    scores = chat.with_head("score")
    stages = build_all(scores, 2)
    tokenizer = RunTokenizer(chat.tokenizer_path, 2, of_model=True, end_of_turn=end_of_turn)

    export_model(Held(stages), scores, tmp_path / "out", adapter=None, tokenizer=tokenizer)

    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", local_files_only=True)
    text = torch.tensor([[4, 5, 6, end]])
    torch.testing.assert_close(whole(text).logits[0], chain(stages, text)[0, -1], rtol=1e-6, atol=1e-7)


def test_an_adapter_takes_the_tokenizer_along_and_names_no_path(chat, tmp_path):
    adapted = Held(build_all(chat, 2, adapter=LoraConfig(rank=2)))

    export_model(adapted, chat, tmp_path / "out", adapter=LoraConfig(rank=2), tokenizer=tokenizer_of(chat))

    written = (tmp_path / "out/adapter_config.json").read_text()
    assert json.loads(written)["base_model_name_or_path"] == "Chat-1M"
    assert str(tmp_path) not in written
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def test_the_class_that_an_export_names_is_in_vllms_registry_but_for_three_families():
    lacking = {name for name in FAMILIES if architecture_of(name) not in VLLM.split()}

    assert lacking == {"helium", "modernbert", "t5"}


@pytest.mark.quick_cases("bloom", "falcon", "gpt2", "llama", "opt", "gemma3_text", "gpt_neox", "phi", "qwen3_moe")
@pytest.mark.parametrize("name", sorted(name for name, one in FAMILIES.items() if "causal" in one.attention_kinds))
def test_every_family_names_the_class_that_loads_it_and_is_read_by_transformers(cache, tmp_path, name):
    source = ModelSource(model_of(name, cache))
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = RunTokenizer(tmp_path / "tokenizer.json", 2, of_model=False)

    export_model(trained_copy(source), source, tmp_path / "out", adapter=None, tokenizer=tokenizer)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert model.config.architectures == [type(model).__name__]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True).eos_token == "<end>"
    ids = some_ids()
    assert torch.equal(model.eval()(ids).logits, whole_model(source).eval()(ids).logits)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_older_programs_find_how_positions_are_rotated(rope):
    given = CONFIG_MAPPING["llama"](rope_parameters={"rope_theta": 5e5, **rope})

    written = with_older_keys(json.loads(given.to_json_string(use_diff=False)))

    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"].items() >= rope.items()
    assert CONFIG_MAPPING["llama"].from_dict(dict(written)).rope_parameters == given.rope_parameters
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert CONFIG_MAPPING["llama"].from_dict(older).rope_parameters == given.rope_parameters


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("gpt2", "n_ctx", 24),
        ("gpt_neox", "rotary_pct", 0.25),
        ("gpt_neox", "rotary_emb_base", 10000),
        ("cohere2", "rotary_pct", 1.0),
        ("llama", "rope_theta", 10000.0),
        ("phi", "partial_rotary_factor", 0.5),
        ("gemma3_text", "rope_theta", 1e6),
        ("gemma3_text", "rope_local_base_freq", 1e4),
    ],
)
def test_an_exported_config_has_the_keys_that_older_programs_read(cache, tmp_path, name, key, value):
    source = ModelSource(model_of(name, cache))
    assert key not in source.hub_config_dict

    export_model(trained_copy(source), source, tmp_path / "out", adapter=None)

    assert json.loads((tmp_path / "out/config.json").read_text())[key] == value


@pytest.mark.parametrize("name", sorted(ARCHITECTURE_NAMES))
def test_every_tensor_has_a_name_in_gguf(cache, tmp_path, name):
    # llama.cpp has no phi with norms of queries and keys
    source = ModelSource(model_of(name, cache, **({"qk_layernorm": False} if name == "phi" else {})))
    export_model(trained_copy(source), source, tmp_path / "out", adapter=None)
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURE_NAMES[name]), source.num_layers)

    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        names = list(file.keys())
    # the hub's files of bloom leave the prefix out, and transformers reads both
    names = [one.removeprefix("transformer.") if name == "bloom" else one for one in names]

    assert not [one for one in names if known.get_name(one, try_suffixes=(".weight", ".bias")) is None]


def test_the_older_form_of_a_tokenizer_is_made_into_the_newer_one(cache, tmp_path):
    directory = tmp_path / "opt"
    whole_model(ModelSource(model_of("opt", cache))).save_pretrained(directory)
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(["low lower lowest newer newest"] * 9, trainer)
    pieces.model.save(str(directory))
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    assert not (directory / "tokenizer.json").exists()

    source = open_model(ModelConfig(path=str(directory)), tmp_path / "cache", seed=1)
    tokenizer = load_tokenizer(ModelTokenizerConfig(), source.tokenizer_path)

    assert tokenizer.encode_texts(["lower newest"])[0] == pieces.encode("lower newest").ids
    assert tokenizer.eos_id == 1
    assert not (directory / "tokenizer.json").exists()
    assert open_model(ModelConfig(path=str(directory)), tmp_path / "cache", seed=1).tokenizer_path == (
        source.tokenizer_path
    )


def test_an_older_form_that_is_no_tokenizer_is_refused_by_name(cache, tmp_path):
    directory = tmp_path / "opt"
    whole_model(ModelSource(model_of("opt", cache))).save_pretrained(directory)
    (directory / "vocab.json").write_text("[]")
    (directory / "merges.txt").write_text("a\n")

    with pytest.raises(ModelError, match=r"opt: transformers makes no tokenizer of its files"):
        open_model(ModelConfig(path=str(directory)), tmp_path / "cache", seed=1)


def test_a_random_model_of_a_directory_keeps_its_tokenizer_and_template(chat, tmp_path):
    config = ModelConfig(path=str(chat.directory), from_scratch=True)

    source = open_model(config, tmp_path / "cache", seed=1)

    assert source.directory != chat.directory
    assert AutoTokenizer.from_pretrained(source.directory, local_files_only=True).chat_template == TEMPLATE
