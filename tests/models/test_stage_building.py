"""Stages: names, empty stages, inputs, the stage table."""

import contextlib
import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.integrations import init_empty_weights
from planned_models import PLANNED
from test_encoder_decoder import ARCHITECTURES as BOTH
from test_encoders import ARCHITECTURES as ENCODERS
from tiny_models import ARCHITECTURES, build_all, chain, named, some_ids, spec_of, tiny_source, whole_model

from phalanx.errors import ConfigError, ModelError
from phalanx.models import (
    FAMILIES,
    LoraConfig,
    StageSpec,
    build_empty_stage,
    build_stage,
    estimate_costs,
    partition_layers,
    stage_table,
    tie_head,
)
from phalanx.models.quiet import quiet_transformers


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def empty(source, spec, adapter=None):
    return build_empty_stage(
        source.hub_config_dict, spec, adapter=adapter, activation_checkpointing=False, attention="sdpa"
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stages_carry_the_names_of_the_whole_model(cache, name):
    source = tiny_source(name, cache)
    stages = build_all(source, 3)

    assert named(stages).keys() == dict(whole_model(source).named_parameters()).keys()
    for stage in stages:
        blocks = {
            int(key.split(f".{stage.family.blocks}.")[1].split(".")[0])
            for key in stage.all_parameters()
            if f".{stage.family.blocks}." in key
        }
        assert blocks == set(range(stage.spec.first_layer, stage.spec.end_layer))
        assert stage.state_dict().keys() == dict(stage.named_parameters(remove_duplicate=False)).keys()


@pytest.mark.quick_cases("*-None", "llama-adapter1", "gpt2-untied-adapter1", "falcon-serial-adapter1")
@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_empty_stage_filled_from_elsewhere_computes_the_same(cache, name, adapter):
    source, ids = tiny_source(name, cache), some_ids()
    stages = build_all(source, 3, adapter=adapter)
    copies = [empty(source, stage.spec, adapter) for stage in stages]

    assert all(bool(value.isnan().all()) for value in named(copies[1:2]).values())
    tie_head(copies[0], copies[-1])
    with torch.no_grad():
        for theirs, ours in zip(copies, stages, strict=True):
            assert list(theirs.all_parameters()) == list(ours.all_parameters())
            for key, value in theirs.all_parameters().items():
                value.copy_(ours.all_parameters()[key])

    assert torch.equal(chain(copies, ids), chain(stages, ids))


def test_a_copy_of_a_stage_is_independent(cache):
    stage = build_all(tiny_source("gpt2", cache), 3)[1]
    shadow, x = copy.deepcopy(stage), torch.randn(2, 5, 32)

    before = stage(x)
    with torch.no_grad():
        for value in shadow.parameters():
            value.zero_()

    assert torch.equal(stage(x), before)


def test_a_last_stage_without_the_first_reads_the_embedding_as_its_head(cache):
    source = tiny_source("gpt2", cache)
    stage = build_stage(
        source, spec_of(source, 3, 2), adapter=None, activation_checkpointing=False, attention="sdpa", seed=0
    )

    assert torch.equal(stage.all_parameters()["lm_head.weight"], source.read_tensor("transformer.wte.weight"))


def test_only_first_and_last_can_be_tied(cache):
    stages = build_all(tiny_source("gpt2", cache), 3)

    with pytest.raises(ModelError, match="only the first and the last stage"):
        tie_head(stages[0], stages[1])


def test_a_head_is_not_tied_while_another_thread_builds_on_the_meta_device(cache):
    source = tiny_source("gpt2", cache)
    first, last = (
        build_stage(
            source, spec_of(source, 3, n), adapter=None, activation_checkpointing=False, attention="sdpa", seed=0
        )
        for n in (0, 2)
    )
    patched, go_on = threading.Event(), threading.Event()

    def build():
        # what peft does while it adds adapters: every parameter that a module is given goes to the meta device
        with quiet_transformers(), init_empty_weights():
            patched.set()
            go_on.wait()

    builder, tying = threading.Thread(target=build), threading.Thread(target=tie_head, args=(first, last))
    builder.start()
    patched.wait()
    tying.start()
    tying.join(0.2)
    go_on.set()
    builder.join()
    tying.join()

    assert last.get_parameter("lm_head.weight") is first.get_parameter(first.family.embedding_weight)


@pytest.mark.parametrize(
    ("index", "x", "message"),
    [
        (0, torch.zeros(2, 3, 4), r"stage 0: found input of shape \[2, 3, 4\]; expected \[batch, seq\]"),
        (
            1,
            torch.zeros(2, 3, 31),
            r"stage 1: found input of shape \[2, 3, 31\]; expected \[batch, seq, 32\]",
        ),
        (1, torch.zeros(2, 3), r"stage 1: found input of shape"),
        (
            0,
            torch.zeros(1, 25, dtype=torch.long),
            "25 tokens; the model has 24 positions; lower sequence_length",
        ),
    ],
)
def test_an_input_of_another_shape_is_refused(cache, index, x, message):
    stages = build_all(tiny_source("gpt2", cache), 2)

    with pytest.raises(ModelError, match=message):
        stages[index](x)


def test_the_longest_sequence_is_accepted(cache):
    stages = build_all(tiny_source("gpt2", cache), 2)

    assert chain(stages, some_ids(seq=24)).shape == (2, 24, 61)
    assert stages[0](some_ids(seq=1)).shape == stages[0].hidden_shape(2, 1)


@pytest.mark.parametrize("spec", [StageSpec(1, 2, 2, 3), StageSpec(0, 2, 0, 4), StageSpec(1, 2, 2, 5)])
def test_a_spec_that_does_not_fit_the_model_is_refused(cache, spec):
    with pytest.raises(ModelError, match="the model has 4 layers"):
        empty(tiny_source("gpt2", cache), spec)


def test_an_empty_stage_of_a_malformed_config_is_refused(cache):
    data = tiny_source("gpt2", cache).hub_config_dict | {"n_embd": "wide"}

    with pytest.raises(ModelError, match="model config: is refused"):
        build_empty_stage(data, StageSpec(0, 1, 0, 4), adapter=None, activation_checkpointing=False, attention="sdpa")


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), st.sampled_from(["linear", 2.0, []])),
)


@pytest.mark.quick_cases("llama")
@settings(deadline=None)
@given(data=st.data(), value=JSON_VALUES)
@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_any_value_in_a_config_is_taken_or_refused_by_name(cache, name, data, value):
    config = tiny_source(name, cache).hub_config_dict
    config[data.draw(st.sampled_from(sorted(config)))] = value

    with contextlib.suppress(ModelError):
        build_empty_stage(config, StageSpec(0, 1, 0, 4), adapter=None, activation_checkpointing=False, attention="sdpa")


def test_a_config_that_sees_the_future_is_refused(cache):
    config = tiny_source("llama", cache).hub_config_dict | {"is_causal": False}

    with pytest.raises(ModelError, match="must not see the future"):
        build_empty_stage(config, StageSpec(0, 1, 0, 4), adapter=None, activation_checkpointing=False, attention="sdpa")


@pytest.mark.quick_cases("*-None", "llama-adapter1", "gpt2-untied-adapter1", "falcon-serial-adapter1")
@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stage_table_counts_what_is_built(cache, name, adapter):
    source = tiny_source(name, cache)
    stages = build_all(source, 3, adapter=adapter)

    rows = stage_table(source.hub_config, tuple(stage.spec for stage in stages), adapter)

    for row, stage in zip(rows, stages, strict=True):
        assert (row.first_layer, row.end_layer) == (stage.spec.first_layer, stage.spec.end_layer)
        assert row.parameters == sum(p.numel() for p in stage.all_parameters().values())
        assert row.trainable == sum(p.numel() for p in stage.trainable_parameters().values())
        assert row.size_bytes == 4 * row.parameters


def test_costs_are_counted_in_blocks(cache):
    source = tiny_source("llama", cache)
    block = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48

    first, head = estimate_costs(source.hub_config)

    assert first == pytest.approx(32 / block)
    assert head == pytest.approx(61 * 32 / block)


def test_a_narrow_embedding_costs_its_projections(cache):
    block = 4 * 32 * 32 + 2 * 32 * 48

    first, head = estimate_costs(tiny_source("opt-post-norm", cache).hub_config)

    assert first == pytest.approx((16 + 32 + 16 * 32) / block)
    assert head == pytest.approx((61 * 16 + 16 * 32) / block)


def test_the_table_of_families_is_complete():
    written, encoders = {"bloom", "falcon", "gpt2", "llama", "opt"}, {"bert", "modernbert", "t5"}
    assert {config["model_type"] for config in ARCHITECTURES.values()} == written
    assert {config["model_type"] for config in (*ENCODERS.values(), *BOTH.values())} == encoders
    assert set(FAMILIES) == written | encoders | set(PLANNED)


def test_more_stages_than_layers_cannot_be_built(cache):
    with pytest.raises(ConfigError, match="lower stages to 4"):
        partition_layers(tiny_source("gpt2", cache).num_layers, 5, None, 0.0, 0.0)
