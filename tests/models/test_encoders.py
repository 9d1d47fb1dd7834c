"""The chain of an encoder's stages computes what transformers' masked language model computes, to the bit."""

import json
from functools import lru_cache

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PRECISIONS, Held, autocast_of, dtype_of, gradients_of, in_precision
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM

from phalanx.checkpoint.export import RunTokenizer, export_model
from phalanx.errors import ModelError
from phalanx.models import (
    FAMILIES,
    LoraConfig,
    ModelConfig,
    ModelSource,
    build_stage,
    open_model,
    partition_layers,
    tie_head,
)
from phalanx.models.directory import WEIGHTS
from phalanx.planner.model.read import shape_of

VOCAB, LAYERS, SEQ = 61, 4, 20
_BERT = {
    "model_type": "bert",
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "pad_token_id": None,
}
_MODERN = {
    "model_type": "modernbert",
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    # shorter than the rows: two layers of three see a part of them
    "local_attention": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
ARCHITECTURES = {
    "bert": _BERT,
    "bert-untied": _BERT | {"tie_word_embeddings": False, "hidden_act": "relu"},
    "modernbert": _MODERN,
    "modernbert-untied": _MODERN | {"tie_word_embeddings": False, "attention_bias": True, "norm_bias": True},
    "modernbert-bare": _MODERN | {"decoder_bias": False, "classifier_bias": True, "mlp_bias": True},
}
_NONE = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "modernbert": ("attention_dropout", "embedding_dropout", "mlp_dropout"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def source_of(name, cache, dropout=0.0) -> ModelSource:
    architecture = ARCHITECTURES[name]
    known = architecture | dict.fromkeys(_NONE[architecture["model_type"]], dropout)
    return open_model(ModelConfig(from_scratch=True, architecture=known), cache, seed=3)


def whole_model(source, attention="sdpa", precision="fp32"):
    return AutoModelForMaskedLM.from_pretrained(
        source.directory, attn_implementation=attention, dtype=dtype_of(precision), local_files_only=True
    ).train()


def stages_of(source, count, attention="sdpa", adapter=None, recompute=False):
    specs = partition_layers(source.num_layers, count, None, 0.0, 0.0)
    stages = [
        build_stage(source, spec, adapter=adapter, activation_checkpointing=recompute, attention=attention, seed=5)
        for spec in specs
    ]
    tie_head(stages[0], stages[-1])
    return stages


def rows():
    draw = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCAB, (3, SEQ), generator=draw)
    labels = torch.where(torch.rand(ids.shape, generator=draw) < 0.3, ids, torch.full_like(ids, -100))
    return torch.where(labels == -100, ids, torch.ones_like(ids)), labels


def chain(stages, x):
    for stage in stages:
        x = stage(x)
    return x


def loss_of(logits, labels):
    return cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def gradients(parameters):
    return {name: one.grad for name, one in parameters if one.grad is not None}


def trained(stages):
    return {name: one for stage in stages for name, one in stage.all_parameters().items()}.items()


@lru_cache(maxsize=len(PRECISIONS))
def whole_pass(directory, precision):
    """Transformers' whole model with its gradients, what it says, and the loss of it."""
    (ids, labels), model = rows(), whole_model(ModelSource(directory), precision=precision)
    with autocast_of(precision):
        expected = model(input_ids=ids, labels=labels)
    # transformers has the loss of BERT's logits in bf16 where weights are, and that of ModernBERT's in float32
    wanted = loss_of(expected.logits.float(), labels)
    wanted.backward()
    return model, expected, wanted.detach()


@pytest.mark.quick_cases("*-3-fp32", "modernbert-untied-*")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_stages", range(1, LAYERS + 1))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_are_bit_equal(cache, name, num_stages, precision):
    source = source_of(name, cache)
    model, expected, wanted = whole_pass(source.directory, precision)
    (ids, labels), stages = rows(), in_precision(stages_of(source, num_stages), precision)

    with autocast_of(precision):
        logits = chain(stages, ids)
    loss = loss_of(logits.float(), labels)
    loss.backward()

    assert torch.equal(logits, expected.logits.to(logits.dtype))
    assert torch.equal(loss, wanted)
    assert precision == "bf16_weights" or torch.equal(loss, expected.loss)
    whole, sliced = gradients(model.named_parameters()), gradients_of(stages)
    assert whole.keys() == sliced.keys()
    for key, value in whole.items():
        assert torch.equal(sliced[key], value), key


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_eager_attention_dropout_and_recomputation_are_bit_equal_too(cache, name):
    ids, labels = rows()
    plain = source_of(name, cache)
    assert torch.equal(chain(stages_of(plain, 3, "eager"), ids), whole_model(plain, "eager")(input_ids=ids).logits)
    drops = source_of(name, cache, 0.2)
    torch.manual_seed(1)
    expected = whole_model(drops)(input_ids=ids).logits
    found = []
    for recompute in (False, True):
        stages = stages_of(drops, 3, recompute=recompute)
        torch.manual_seed(1)
        logits = chain(stages, ids)
        assert torch.equal(logits, expected)
        loss_of(logits, labels).backward()
        found.append(gradients(trained(stages)))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_counted_parameters_are_real_ones(cache, name):
    source = source_of(name, cache)

    shape = shape_of(source.hub_config_dict)

    assert shape.num_parameters == sum(p.numel() for p in whole_model(source).parameters())


def test_adapters_train_alone(cache):
    stages = stages_of(source_of("bert", cache), 2, adapter=LoraConfig(rank=4))
    ids, labels = rows()

    loss_of(chain(stages, ids), labels).backward()

    names = [name for stage in stages for name in stage.trainable_parameters()]
    assert len(names) == LAYERS * 2 * 2
    assert all(".query.lora_" in name or ".value.lora_" in name for name in names)


def test_files_of_the_first_berts_are_read_by_their_older_names(cache, tmp_path):
    source = source_of("bert", cache)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(source.directory / WEIGHTS).items()
    }
    assert any(name.endswith(".gamma") for name in old)
    save_file(old, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((source.directory / "config.json").read_text())

    found, expected = (chain(stages_of(one, 2), rows()[0]) for one in (ModelSource(tmp_path), source))

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("modernbert", {"sparse_prediction": True}, "sparse_prediction"),
    ],
)
def test_what_stages_cannot_carry_is_refused_by_name(cache, name, change, said):
    with pytest.raises(ModelError, match=said):
        open_model(ModelConfig(from_scratch=True, architecture=ARCHITECTURES[name] | change), cache, seed=3)


def test_an_encoder_has_no_other_attention_and_no_other_head(cache):
    stage = stages_of(source_of("bert", cache), 1)[0]
    assert FAMILIES["bert"].usual_attention == "bidirectional"
    stage.attends = "documents"

    with pytest.raises(ModelError, match="bert: has no documents attention"):
        stage(rows()[0])
    with pytest.raises(ModelError, match="more than one layer"):
        stage.replace_head(torch.nn.Linear(32, 2))


def test_older_keys_of_modernbert_are_accepted(cache):
    architecture = _MODERN | {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 100.0}

    source = open_model(ModelConfig(from_scratch=True, architecture=architecture), cache, seed=3)

    kept = json.loads((source.directory / "config.json").read_text())
    assert kept["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert kept["rope_parameters"]["full_attention"]["rope_theta"] == 5000.0


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_exported_encoder_is_read_by_transformers_as_the_masked_language_model_that_it_is(cache, tmp_path, name):
    source = source_of(name, cache)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "[MASK]": 1, "<end>": 2}, unk_token="[UNK]")
    )
    backend.add_special_tokens(["[UNK]", "[MASK]", "<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = RunTokenizer(tmp_path / "tokenizer.json", 2, of_model=False)
    stages = stages_of(source, 3)

    export_model(Held(stages), source, tmp_path / "out", adapter=None, tokenizer=tokenizer)

    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", local_files_only=True).eval()
    assert model.config.architectures == [type(model).__name__]
    ids, _ = rows()
    assert torch.equal(model(input_ids=ids).logits, whole_model(source).eval()(input_ids=ids).logits)
