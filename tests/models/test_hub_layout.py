"""Directories that transformers' own classes have saved are read, and exports are what these classes save."""

import json
import math

import pytest
import tokenizers
import torch
from planned_models import MIXTURES, NO_WINDOWS, OTHERWISE, PLANNED
from safetensors.torch import load_file, save_file
from test_encoder_decoder import ARCHITECTURES as T5
from test_encoders import ARCHITECTURES as ENCODERS
from tiny_models import (
    ARCHITECTURES,
    VOCAB,
    Held,
    build_all,
    chain,
    edit_config,
    some_ids,
    with_own_memory,
    without_dropout,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    pipeline,
)

from phalanx.checkpoint.export import RunTokenizer, export_model
from phalanx.errors import ModelError
from phalanx.models import FAMILIES, ModelSource
from phalanx.models.imported import import_model
from phalanx.models.inspection import inspect_model
from phalanx.objectives.pretraining import MaskedSettings, mask_token_of

DECODERS = (
    PLANNED
    | {name: without_dropout(one) for name, one in ARCHITECTURES.items()}
    | {f"{name}-windowless": PLANNED[name] | change for name, change in NO_WINDOWS.items()}
    | {f"{name}-otherwise": PLANNED[name] | change for name, change in OTHERWISE.items()}
)
CLASSES = dict.fromkeys(DECODERS, AutoModelForCausalLM) | dict.fromkeys(ENCODERS, AutoModelForMaskedLM)
# one of each family, and of those with names of their own the tied ones
QUICK = {name for name in CLASSES if name in FAMILIES}
QUICK_TIED = {"bert", "gpt2", "gpt_neox", "llama", "modernbert", "opt-post-norm", "qwen3_moe"}


def quick_or_slow(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in sorted(names)]


def without_names(architecture):
    return {key: value for key, value in architecture.items() if key != "model_type"}


def theirs(architecture, kind=AutoModelForCausalLM, **changes):
    """A model that transformers has built of a config, whose biases and norms are not what they begin with."""
    config = CONFIG_MAPPING[architecture["model_type"]](**without_names(architecture) | changes)
    torch.manual_seed(3)
    model = kind.from_config(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.02)
    return model


def stages_in_use(source, count=2):
    return [stage.eval() for stage in build_all(source, count)]


def tensors_of(directory):
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def exported(source, out, **options):
    """Export what lies in a directory, and load it by the class that its config names."""
    export_model(Held(build_all(source, 2)), source, out, adapter=None, **options)
    kind = {"hidden": AutoModelForMaskedLM, "target": AutoModelForSeq2SeqLM}.get(
        source.family.facts.predicts, AutoModelForCausalLM
    )
    model, problems = kind.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert not any(problems.values()), problems
    return with_own_memory(model).eval()


@pytest.mark.parametrize("name", quick_or_slow(CLASSES, QUICK))
@pytest.mark.parametrize("ties", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
def test_what_transformers_saves_is_read_and_what_is_exported_is_what_it_saves(tmp_path, name, ties):
    kind, ids = CLASSES[name], some_ids()
    model = theirs((DECODERS | ENCODERS)[name], kind, tie_word_embeddings=ties)
    model.save_pretrained(tmp_path / "hub", max_shard_size="30KB")

    source = ModelSource(tmp_path / "hub")
    with torch.no_grad():
        expected, logits = model(ids).logits, chain(stages_in_use(source), ids)
        again = exported(source, tmp_path / "out")(ids).logits

    assert torch.equal(logits, expected)
    assert torch.equal(again, expected)
    hub, out = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "out")
    assert out.keys() == hub.keys()
    assert all(torch.equal(value, hub[key]) for key, value in out.items())
    assert inspect_model(tmp_path / "out")["parameters"] == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("name", sorted(T5))
def test_an_encoder_with_a_decoder_goes_both_ways(tmp_path, name):
    model = theirs(T5[name] | {"dropout_rate": 0.0}, AutoModelForSeq2SeqLM)
    if name == "t5-1.1":
        # the hub's 1.1 has a head of its own, which transformers would tie
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(tmp_path / "hub")
    given = {"input_ids": some_ids(), "decoder_input_ids": some_ids()[:, :7]}

    again = exported(ModelSource(tmp_path / "hub"), tmp_path / "out")

    assert torch.equal(again(**given).logits, model(**given).logits)
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "hub").keys()


def test_every_family_of_the_table_is_tried():
    tried = {one["model_type"] for one in (DECODERS | ENCODERS | T5).values()}

    assert tried == set(FAMILIES)


@pytest.fixture
def experts(tmp_path):
    """A mixture of experts as the hub has it, one matrix for each expert."""
    model = theirs(PLANNED["qwen3_moe"])
    model.save_pretrained(tmp_path / "hub")
    return model, tmp_path / "hub"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_one_matrix_for_each_expert_as_the_hub_has(tmp_path, name):
    theirs(PLANNED[name]).save_pretrained(tmp_path / "hub")

    exported(ModelSource(tmp_path / "hub"), tmp_path / "out")

    layer = "model.layers.3.block_sparse_moe" if name == "mixtral" else "model.layers.3.mlp"
    last = {key.rpartition(".experts.3.")[2] for key in tensors_of(tmp_path / "out") if f"{layer}.experts.3." in key}
    parts = ("w1", "w2", "w3") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    assert last == {f"{part}.weight" for part in parts}
    assert f"{layer}.gate.weight" in tensors_of(tmp_path / "out")


@pytest.mark.parametrize("name", MIXTURES)
def test_joined_experts_of_other_writers_are_read_too(name, tmp_path):
    model, directory = theirs(PLANNED[name]), tmp_path / "hub"
    model.save_pretrained(directory)
    save_file(dict(model.named_parameters()), directory / "model.safetensors", {"format": "pt"})

    assert torch.equal(chain(stages_in_use(ModelSource(directory)), some_ids()), model(some_ids()).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("model.layers.2.mlp.experts.3.up_proj.weight"), r"experts\.3\.up_proj\.weight' is miss"),
        (lambda held: held.pop("model.layers.1.mlp.experts.3.gate_proj.weight"), r"experts\.3\.gate_proj.* is missing"),
        (
            lambda held: held.update(
                {"model.layers.0.mlp.experts.4.down_proj.weight": held["model.layers.0.mlp.experts.3.down_proj.weight"]}
            ),
            r"holds 'model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight'; config\.json says 4 experts",
        ),
        (
            lambda held: held.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(24, 31)}),
            r"experts\.1\.up_proj\.weight' has shape \[24, 31\]; config\.json says \[24, 32\]",
        ),
    ],
    ids=["a part", "an expert", "one more", "another shape"],
)
def test_experts_that_do_not_fit_the_config_are_named(experts, change, message):
    _, directory = experts
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    # tensors of a file own their memory
    save_file({name: value.clone() for name, value in tensors.items()}, directory / "model.safetensors")

    with pytest.raises(ModelError, match=message):
        build_all(ModelSource(directory), 2)


@pytest.mark.parametrize("name", quick_or_slow(CLASSES, QUICK_TIED))
def test_a_tied_model_that_kept_its_head_alone_is_taken(tmp_path, name):
    kind, ids = CLASSES[name], some_ids()
    model = theirs((DECODERS | ENCODERS)[name], kind, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "hub")
    family = FAMILIES[model.config.model_type]
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    tensors[family.head_weight] = tensors.pop(family.embedding_weight)
    save_file(tensors, tmp_path / "hub" / "model.safetensors", {"format": "pt"})

    source = ModelSource(tmp_path / "hub")

    assert torch.equal(chain(stages_in_use(source), ids), model(ids).logits)
    assert torch.equal(exported(source, tmp_path / "out")(ids).logits, model(ids).logits)
    import_model(tmp_path / "hub", tmp_path / "copy")
    assert inspect_model(tmp_path / "copy")["head"].startswith("tied to")


@pytest.mark.parametrize("kept", ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_a_t5_that_kept_its_embedding_under_another_name_is_taken(tmp_path, kept):
    model = theirs(T5["t5"] | {"dropout_rate": 0.0}, AutoModelForSeq2SeqLM)
    model.save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    tensors[kept] = tensors.pop("shared.weight")
    save_file(tensors, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    given = {"input_ids": some_ids(), "decoder_input_ids": some_ids()[:, :7]}

    again = exported(ModelSource(tmp_path / "hub"), tmp_path / "out")

    assert torch.equal(again(**given).logits, model(**given).logits)


def test_an_untied_model_that_lacks_its_embedding_is_refused(tmp_path):
    theirs(PLANNED["qwen3"], tie_word_embeddings=False).save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "hub" / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match=r"tensor 'model\.embed_tokens\.weight' is missing"):
        build_all(ModelSource(tmp_path / "hub"), 2)


def test_head_and_embedding_that_are_both_there_and_differ_are_still_refused(tmp_path):
    theirs(PLANNED["qwen3"], tie_word_embeddings=False).save_pretrained(tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    with pytest.raises(ModelError, match="but the files hold different values"):
        ModelSource(tmp_path / "hub").check_tied()


WORDS = ["[UNK]", "[END]", "[MASK]", "<hide>", "the", "cat", "sat", "on", "mat"]


def words(tmp_path, **named):
    """A tokenizer of whole words, with the companions that a model has if some are named."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "[END]", "[MASK]", "<hide>"])
    home = tmp_path / "tokenizer"
    home.mkdir()
    made.save(str(home / "tokenizer.json"))
    for name, value in named.items():
        (home / f"{name}.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **value}))
    return home / "tokenizer.json"


@pytest.mark.quick_cases("*-bert-?MASK?", "none-modernbert-<hide>")
@pytest.mark.parametrize(("name", "mask"), [("bert", "[MASK]"), ("modernbert", "<hide>")])
@pytest.mark.parametrize(
    "companions",
    [
        {},
        {"tokenizer_config": {"unk_token": "[UNK]"}},
        {"tokenizer_config": {"mask_token": "[MASK]", "pad_token": "[END]"}},
        {"tokenizer_config": {"mask_token": "[MASK]"}, "special_tokens_map": {"mask_token": "[MASK]"}},
    ],
    ids=["none", "without a mask", "with a mask", "with a map of special tokens"],
)
def test_an_exported_masked_model_fills_masks(tmp_path, name, mask, companions):
    model = theirs(ENCODERS[name], AutoModelForMaskedLM)
    model.save_pretrained(tmp_path / "hub")
    source = ModelSource(tmp_path / "hub")
    tokenizer = RunTokenizer(words(tmp_path, **companions), 1, of_model=bool(companions), mask_token=mask)

    exported(source, tmp_path / "out", tokenizer=tokenizer)

    fill = pipeline("fill-mask", model=str(tmp_path / "out"), top_k=VOCAB)
    answers = fill(f"the cat {mask} on the mat")
    ids = torch.tensor([[4, 5, WORDS.index(mask), 7, 4, 8]])
    shares = model(ids).logits[0, 2].detach().softmax(-1)
    assert fill.tokenizer.mask_token == mask
    assert [one["token"] for one in answers] == shares.argsort(descending=True).tolist()
    assert math.isclose(answers[0]["score"], float(shares.max()), rel_tol=1e-5)


def test_the_mask_of_a_run_is_that_of_its_objective():
    assert mask_token_of("masked") == "[MASK]"
    assert mask_token_of(MaskedSettings(kind="masked", mask_token="<hide>")) == "<hide>"
    assert mask_token_of("causal_lm") is None


def test_more_experts_than_the_files_have_take_no_memory(experts):
    _, directory = experts
    edit_config(directory, num_local_experts=2**40)

    with pytest.raises(ModelError, match=r"experts\.4\.gate_proj\.weight' is missing"):
        stages_in_use(ModelSource(directory))
