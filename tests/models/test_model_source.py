"""Model directories: what is read, what is refused."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, build_all, edit_config, named, spec_of, tiny_source, whole_model

from phalanx.errors import ModelError
from phalanx.models import ModelConfig, ModelSource, build_stage, open_model, weights_digest


@pytest.fixture
def source(tmp_path):
    return tiny_source("llama", tmp_path / "cache")


@pytest.fixture
def directory(source):
    return source.directory


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def build(source, num_stages=2, index=0):
    return build_stage(
        source,
        spec_of(source, num_stages, index),
        adapter=None,
        activation_checkpointing=False,
        attention="sdpa",
        seed=0,
    )


def test_a_stage_reads_its_own_tensors_and_no_others(source, directory):
    own = build(source, 4, 1).all_parameters()
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in set(tensors) - set(own)])
    alone = ModelSource(directory)

    assert build(alone, 4, 1).all_parameters().keys() == own.keys()
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor 'model\.layers\.2\..*' is missing"):
        build(alone, 4, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_become_float32(directory, dtype):
    rewrite(directory, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))

    stages = build_all(ModelSource(directory), 2)

    for name, tensor in load_file(directory / "model.safetensors").items():
        assert named(stages)[name].dtype == torch.float32
        assert torch.equal(named(stages)[name], tensor.float())


def test_reading_one_tensor_gives_memory_of_its_own(source, directory):
    tensor = source.read_tensor("model.norm.weight")
    tensor.zero_()

    assert torch.equal(
        source.read_tensor("model.norm.weight"), load_file(directory / "model.safetensors")["model.norm.weight"]
    )


def test_an_index_over_several_files_loads_the_same(source, directory):
    before = weights_digest(named(build_all(source, 2)).items())
    tensors = load_file(directory / "model.safetensors")
    parts = {
        "a.safetensors": dict(list(tensors.items())[::2]),
        "b.safetensors": dict(list(tensors.items())[1::2]),
    }
    for file, part in parts.items():
        save_file(part, directory / file)
    (directory / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert weights_digest(named(build_all(ModelSource(directory), 2)).items()) == before


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom"])
def test_files_without_the_prefix_of_the_trunk_load_the_same(tmp_path, name):
    source = tiny_source(name, tmp_path)
    before = weights_digest(named(build_all(source, 2)).items())
    prefix = source.family.prefix + "."

    def strip(tensors):
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    rewrite(source.directory, strip)

    assert weights_digest(named(build_all(ModelSource(source.directory), 2)).items()) == before


def test_a_tokenizer_is_found_beside_the_weights(directory):
    assert ModelSource(directory).tokenizer_path is None

    (directory / "tokenizer.json").write_text("{}")

    assert ModelSource(directory).tokenizer_path == directory / "tokenizer.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"config\.json: cannot be read .* hub's layout"),
        ("config.json", "{", r"config\.json: is not valid JSON"),
        ("config.json", "[" * 100_000, r"config\.json: is not valid JSON"),
        ("config.json", "[]", "found a list; expected an object"),
        (
            "config.json",
            '{"model_type": "longt5"}',
            "found 'longt5', for which transformers has no pipeline plan",
        ),
        ("config.json", '{"model_type": ["gpt2"]}', "expected one of arcee, bert, bloom, cohere"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', "refused by transformers"),
        ("model.safetensors", None, r"no model\.safetensors and no model\.safetensors\.index\.json"),
        ("model.safetensors", "junk", r"model\.safetensors: cannot be read as safetensors"),
    ],
)
def test_missing_and_malformed_files_are_named(directory, file, content, message):
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content)

    with pytest.raises(ModelError, match=message):
        ModelSource(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
        ({"hidden_size": 33}, "multiple of"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_configs_that_cannot_be_trained_in_stages_are_refused(directory, changes, message):
    edit_config(directory, **changes)

    with pytest.raises(ModelError, match=message):
        ModelSource(directory)


def test_pickled_weights_are_refused_unopened(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")

    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin: pickled weights .* `phalanx model convert DIR OUT` makes safetensors"
    ):
        ModelSource(directory)


def test_a_truncated_file_is_refused(directory):
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[:-1])

    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        ModelSource(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "malformed"),
        ("{}", "malformed"),
        ('{"weight_map": []}', "malformed"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"names the file '\.\./a\.safetensors'"),
        ('{"weight_map": {"a": "weights.bin"}}', r"names the file 'weights\.bin'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"'gone\.safetensors', which is missing"),
    ],
)
def test_a_malformed_index_is_refused(directory, index, message):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ModelError, match=message):
        ModelSource(directory)


def test_a_tensor_that_the_index_only_promises_is_refused(directory):
    shutil.move(directory / "model.safetensors", directory / "a.safetensors")
    names = [*load_file(directory / "a.safetensors"), "model.layers.9.x"]
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"'model\.layers\.9\.x' is named in .*index.json but is not in the file"):
        ModelSource(directory).read_tensor("model.layers.9.x")


def test_a_wrong_shape_is_refused(directory):
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))

    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \[31\]; config\.json says \[32\]"):
        build(ModelSource(directory), 2, 1)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (
            {"vocab_size": 2**40},
            r"'model\.embed_tokens\.weight' has shape \[61, 32\]; config\.json says \[10995",
        ),
        (
            {"intermediate_size": 2**40},
            r"gate_proj\.weight' has shape \[48, 32\]; config\.json says \[10995",
        ),
        ({"num_hidden_layers": 2000}, "config.json: claims 2000 layers; the safetensors beside it hold 39 tensors"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers: found 20000; expected 10000 at most"),
        ({"num_labels": 20_000}, "num_labels: found 20000; expected 10000 at most"),
        ({"head_dim": 2**40}, "head_dim: found 1099511627776; expected 1 to 65536"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e12}}, "partial_rotary_factor: found"),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_before_there_is_memory(directory, claims, message):
    """No machine has so much: what asked for it was an error of torch's, and a smaller claim took the memory."""
    edit_config(directory, **claims)

    with pytest.raises(ModelError, match=message):
        build(ModelSource(directory), 2, 0)


def test_whole_numbers_are_refused(directory):
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))

    with pytest.raises(ModelError, match="has type I8; expected one of BF16"):
        build(ModelSource(directory), 2, 1)


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path):
    source = tiny_source("llama-tied", tmp_path)
    embedding = source.read_tensor("model.embed_tokens.weight")
    rewrite(source.directory, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))

    assert build(ModelSource(source.directory), 2, 1) is not None

    rewrite(source.directory, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelError, match="set tie_word_embeddings to false"):
        build(ModelSource(source.directory), 2, 1)


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is no directory"):
        open_model(ModelConfig(path=str(tmp_path / "nothing")), tmp_path, seed=0)


def test_random_weights_depend_on_the_seed_and_leave_the_generator_alone(tmp_path):
    config = ModelConfig(architecture=ARCHITECTURES["gpt2"], from_scratch=True)
    state = torch.get_rng_state()

    first, again = open_model(config, tmp_path / "a", 1), open_model(config, tmp_path / "b", 1)
    other = open_model(config, tmp_path / "a", 2)

    assert torch.equal(torch.get_rng_state(), state)
    content = [(s.directory / "model.safetensors").read_bytes() for s in (first, again, other)]
    assert content[0] == content[1]
    assert content[0] != content[2]
    assert open_model(config, tmp_path / "a", 1).directory == first.directory
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([first.directory.name, other.directory.name])


def test_random_weights_follow_the_familys_own_rule(tmp_path):
    source = tiny_source("gpt2", tmp_path)

    assert float(source.read_tensor("transformer.wte.weight").std()) == pytest.approx(0.02, rel=0.1)
    assert float(source.read_tensor("transformer.h.0.mlp.c_proj.weight").std()) == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert torch.equal(source.read_tensor("transformer.ln_f.weight"), torch.ones(32))


def test_random_weights_can_take_shape_and_tokenizer_of_a_directory(tmp_path, directory):
    (directory / "tokenizer.json").write_text("{}")

    fresh = open_model(ModelConfig(path=str(directory), from_scratch=True), tmp_path / "new", 9)

    assert fresh.tokenizer_path.read_text() == "{}"
    assert fresh.tokenizer_path.parent == fresh.directory != directory
    assert (fresh.num_layers, fresh.hidden_size, fresh.vocab_size) == (4, 32, 61)
    assert str(directory) not in (fresh.directory / "config.json").read_text()


def test_a_written_model_opens_in_transformers(directory):
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        names = set(file.keys())

    assert {name for name, _ in whole_model(ModelSource(directory)).named_parameters()} == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 4}, "unknown key 'n_heads' for gpt2; choices: .*n_head"),
        ({"model_type": "mamba"}, "model.architecture: model_type: found 'mamba'"),
        ({"n_head": 5}, "multiple of 5 attention heads"),
        ({"activation_function": "nope"}, "cannot be built"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_a_wrong_architecture_is_refused(tmp_path, changes, message):
    config = ModelConfig(architecture=ARCHITECTURES["gpt2"] | changes, from_scratch=True)

    with pytest.raises(ModelError, match=message):
        open_model(config, tmp_path, 0)

    assert not any(tmp_path.iterdir())


def test_layers_that_are_skipped_at_random_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"layerdrop = 0\.5 .* set it to 0"):
        tiny_source("opt", tmp_path, layerdrop=0.5)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelError, match="file: cannot be written"):
        tiny_source("opt", tmp_path / "file")
