"""Parameter counts out of a config.json are exact, and a config that cannot be counted is refused."""

import json
import math
from pathlib import Path

import pytest

from phalanx.errors import ConfigError, ModelError
from phalanx.planner.cluster.catalog import known_models, open_model_shape
from phalanx.planner.model.families.planned import PLANNED
from phalanx.planner.model.read import read_shape, shape_of

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 64,
}
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160}
SMALL_GPT2 = GPT2 | {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 32}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("opt-125m", 125_239_296),
        ("opt-350m", 331_196_416),
        ("bloom-560m", 559_214_592),
        ("smollm2-135m", 134_515_008),
        ("llama-65b", 65_285_660_672),
        ("llama-2-70b", 68_976_648_192),
        ("gpt3-175b", 174_604_259_328),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert known_models()[name].num_parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        SMALL_GPT2,
        SMALL_GPT2 | {"tie_word_embeddings": False, "n_inner": 96},
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
        OPT,
        OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
        BLOOM,
        BLOOM | {"tie_word_embeddings": False},
    ],
)
def test_a_count_is_that_of_the_model_which_transformers_builds(config: dict[str, object]) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config)))

    assert shape_of(config).num_parameters == sum(parameter.numel() for parameter in built.parameters())


PLANNED_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 160,
    "pad_token_id": None,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"num_key_value_heads": 2, "head_dim": 8}], ids=["defaults", "given"])
@pytest.mark.parametrize("family", PLANNED)
def test_a_family_with_a_plan_is_counted_as_transformers_builds_it(
    family: str, sizes: dict[str, int], tied: bool
) -> None:
    from phalanx.models import parse_hub_config
    from phalanx.models.build import parameter_shapes

    config = {"model_type": family, **PLANNED_SIZES, **sizes, "tie_word_embeddings": tied}
    if family == "gpt_neox":
        # each of its query heads has keys and values of its own
        config = {key: value for key, value in config.items() if key not in sizes}
    elif not sizes:
        # as many heads as are a multiple of the family's heads of keys and values, as wide as its heads are
        defaults = PLANNED[family].defaults
        config["num_attention_heads"] = heads = 2 * defaults.get("num_key_value_heads", 4)
        config["hidden_size"] = heads * defaults.get("head_dim", 4)
    shapes = parameter_shapes(parse_hub_config(config, family)).values()

    assert shape_of(config).num_parameters == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("arcee", {"attention_bias": True, "mlp_bias": True}),
        ("cohere", {"use_qk_norm": True, "attention_bias": True}),
        ("ernie4_5", {"use_bias": True}),
        ("glm", {"attention_bias": False}),
        ("gpt_neox", {"attention_bias": False}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("helium", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "num_key_value_heads": 8}),
        ("phi", {"qk_layernorm": True}),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
        ("starcoder2", {"use_bias": False}),
    ],
)
def test_biases_and_norms_that_a_config_asks_for_are_counted(family: str, changes: dict[str, object]) -> None:
    from phalanx.models import parse_hub_config
    from phalanx.models.build import parameter_shapes

    config = {"model_type": family, **PLANNED_SIZES, **changes}
    shapes = parameter_shapes(parse_hub_config(config, family)).values()

    assert shape_of(config).num_parameters == sum(math.prod(shape) for shape in shapes)


def test_the_parts_of_a_model_add_up_to_it() -> None:
    shape = shape_of(LLAMA)

    assert shape.layers * (shape.layer_split + shape.layer_whole) + shape.embedding + shape.final + shape.head == (
        shape.num_parameters
    )
    assert shape.kv_heads == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "model_type: found 'mamba'; expected one of arcee, bert, bloom, cohere"),
        ({"model_type": None}, "model_type: found None"),
        ({"n_embd": None}, "n_embd: missing; add it"),
        ({"n_layer": 0}, "n_layer: found 0; expected a whole number of at least 1"),
        ({"n_layer": True}, "n_layer: found True"),
        # a plan lists layers: a stranger's file of a few lines took the memory of the machine
        ({"n_layer": 10**9}, "n_layer: found 1000000000; expected 10000 at most"),
        ({"n_embd": 2**41}, "n_embd: found 2199023255552; expected 1099511627776 at most"),
        ({"n_head": 7}, "hidden size 768 is no multiple of 7 attention heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: found 'yes'; expected true or false"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_with_its_key(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        shape_of(GPT2 | change, "models/x/config.json")

    assert str(refused.value).startswith("models/x/config.json: ")
    assert reason in str(refused.value)


def test_a_directory_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))

    assert read_shape(tmp_path) == read_shape(tmp_path / "config.json") == open_model_shape(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_file_that_is_no_config_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(path)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choices: bloom-560m, gpt2"):
        open_model_shape("gpt5")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: found \[0\]; only \[\] can be planned"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: found 2; only 1 can be planned"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: found 5; expected at most its 4 experts"),
        # its default is 8
        ({"num_experts": 7}, "num_experts_per_tok: found 8; expected at most its 7 experts"),
    ],
)
def test_a_mixture_that_no_single_block_size_describes_is_refused(changes: dict[str, object], reason: str) -> None:
    mixture = {"model_type": "qwen3_moe", **PLANNED_SIZES, "num_key_value_heads": 4}
    plain: dict[str, object] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "num_experts": 8}
    assert shape_of(mixture | plain) == shape_of(mixture | {"num_experts": 8})

    with pytest.raises(ModelError, match=reason):
        shape_of(mixture | changes)
