"""The chain of a T5's stages computes what transformers' T5 computes, encoder and decoder in one tensor."""

import json

import pytest
import torch
from tiny_models import Held
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM

from phalanx.checkpoint.export import export_model, read_trained
from phalanx.checkpoint.export_adapter import peft_files
from phalanx.errors import ModelError
from phalanx.models import (
    AttentionPattern,
    LoraConfig,
    ModelConfig,
    ModelSource,
    build_stage,
    open_model,
    partition_layers,
    tie_head,
    with_marks,
)
from phalanx.models.directory import WEIGHTS
from phalanx.planner.model.read import shape_of

VOCAB, SEQ, ENCODER, DECODER = 61, 20, 2, 3
LAYERS = ENCODER + DECODER
_T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": ENCODER,
    "num_decoder_layers": DECODER,
    # so few that far tokens share one
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
ARCHITECTURES = {
    "t5": _T5,
    "t5-1.1": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    # biases that do not fill their rows, heads wider than the model
    "t5-wide": _T5 | {"num_heads": 3, "d_kv": 16, "feed_forward_proj": "gated-silu"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def source_of(name, cache, dropout=0.0, **changes) -> ModelSource:
    architecture = ARCHITECTURES[name] | {"dropout_rate": dropout} | changes
    return open_model(ModelConfig(from_scratch=True, architecture=architecture), cache, seed=3)


def whole_model(source, attention="sdpa"):
    return AutoModelForSeq2SeqLM.from_pretrained(
        source.directory, attn_implementation=attention, dtype=torch.float32, local_files_only=True
    ).train()


def stages_of(source, count, attention="sdpa", adapter=None, recompute=False):
    specs = partition_layers(source.num_layers, count, None, 0.0, 0.0)
    stages = [
        build_stage(source, spec, adapter=adapter, activation_checkpointing=recompute, attention=attention, seed=5)
        for spec in specs
    ]
    tie_head(stages[0], stages[-1])
    return stages


def rows(*prefixes):
    """Ids with marks; and what transformers is given for them: encoder's and decoder's ids, mask, labels."""
    ids = torch.randint(1, VOCAB, (len(prefixes), SEQ + 1), generator=torch.Generator().manual_seed(11))
    text, labels = ids[:, :-1], ids[:, 1:]
    longest, most = max(prefixes), SEQ + 1 - min(prefixes)
    whole = {
        "input_ids": torch.zeros(len(prefixes), longest, dtype=torch.int64),
        "decoder_input_ids": torch.zeros(len(prefixes), most, dtype=torch.int64),
        "labels": torch.full((len(prefixes), most), -100),
    }
    for row, prefix in enumerate(prefixes):
        whole["input_ids"][row, :prefix] = text[row, :prefix]
        whole["decoder_input_ids"][row, 1 : SEQ + 1 - prefix] = text[row, prefix:]
        whole["labels"][row, : SEQ + 1 - prefix] = labels[row, prefix - 1 :]
    if len(set(prefixes)) > 1:
        whole["attention_mask"] = torch.arange(longest) < torch.tensor(prefixes).unsqueeze(1)
    return with_marks(text, {"prefix": torch.tensor(prefixes)}), whole


def chain(stages, x):
    for stage in stages:
        x = stage(x)
    return x


def targets(logits, prefixes):
    """What a decoder predicts, in the places where transformers has it."""
    most = SEQ + 1 - min(prefixes)
    found = logits.new_zeros(len(prefixes), most, VOCAB)
    for row, prefix in enumerate(prefixes):
        found[row, : SEQ + 1 - prefix] = logits[row, prefix - 1 :]
    return found


def loss_of(logits, labels):
    return cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def gradients(parameters):
    return {name: one.grad for name, one in parameters if one.grad is not None}


def trained(stages):
    return {name: one for stage in stages for name, one in stage.all_parameters().items()}.items()


def assert_same(stages, model, prefixes, *, dtype=None):
    x, whole = rows(*prefixes)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        expected = model(**whole, use_cache=False)
        logits = chain(stages, x)
        loss = loss_of(targets(logits, prefixes), whole["labels"])
    expected.loss.backward()
    loss.backward()
    counted = whole["labels"] != -100
    assert logits.shape == (len(prefixes), SEQ, VOCAB)
    assert torch.equal(targets(logits, prefixes)[counted], expected.logits[counted])
    assert torch.equal(loss, expected.loss)
    found, wanted = gradients(trained(stages)), gradients(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if "relative_attention_bias" in name:
            # each stage sums what its own blocks ask of the table, transformers what all of them ask of the scores
            torch.testing.assert_close(found[name], value, rtol=2e-5 if dtype is None else 2e-2, atol=1e-7)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.quick_cases("*-3", "t5-?")
@pytest.mark.parametrize("num_stages", range(1, LAYERS + 1))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_are_bit_equal(cache, name, num_stages):
    source = source_of(name, cache)

    assert_same(stages_of(source, num_stages), whole_model(source), (12, 12, 12))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_of_which_encoders_have_more_and_fewer_tokens_are_transformers_padded_ones(cache, name):
    source = source_of(name, cache)

    assert_same(stages_of(source, 3), whole_model(source), (12, 1, SEQ, 5))


def test_eager_attention_dropout_and_recomputation_are_bit_equal_too(cache):
    plain = source_of("t5", cache)
    assert_same(stages_of(plain, 3, "eager"), whole_model(plain, "eager"), (12, 3))
    drops = source_of("t5-1.1", cache, 0.2)
    (x, whole), found = rows(12, 9), []
    torch.manual_seed(1)
    expected = whole_model(drops)(**whole, use_cache=False).logits
    for recompute in (False, True):
        stages = stages_of(drops, 3, recompute=recompute)
        torch.manual_seed(1)
        logits = targets(chain(stages, x), (12, 9))
        assert torch.equal(logits[whole["labels"] != -100], expected[whole["labels"] != -100])
        loss_of(logits, whole["labels"]).backward()
        found.append(gradients(trained(stages)))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.quick_cases("*-3")
@pytest.mark.parametrize("num_stages", range(1, LAYERS + 1))
@pytest.mark.parametrize("name", ["t5", "t5-1.1"])
def test_bf16_is_bit_equal_too(cache, name, num_stages):
    source = source_of(name, cache)

    assert_same(stages_of(source, num_stages), whole_model(source), (12, 12), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_counted_parameters_are_real_ones(cache, name):
    source = source_of(name, cache)

    assert shape_of(source.hub_config_dict).num_parameters == sum(p.numel() for p in whole_model(source).parameters())


def test_adapters_train_alone_on_both_sides(cache):
    stages = stages_of(source_of("t5", cache), 2, adapter=LoraConfig(rank=4))
    x, whole = rows(12, 12)

    loss_of(targets(chain(stages, x), (12, 12)), whole["labels"]).backward()

    names = [name for stage in stages for name in stage.trainable_parameters()]
    # queries and values of the encoder's blocks, and of a decoder's block twice
    assert len(names) == 2 * 2 * (ENCODER + 2 * DECODER)
    assert all(".q.lora_" in name or ".v.lora_" in name for name in names)
    assert all(one.grad is not None for stage in stages for one in stage.trainable_parameters().values())


def test_an_exported_adapter_is_for_the_blocks_of_both_sides(cache):
    source, adapter = source_of("t5", cache), LoraConfig(rank=4)
    stages = stages_of(source, 2, adapter=adapter)

    config, tensors = peft_files(read_trained(Held(stages)), source, adapter)

    assert "layers_to_transform" not in config
    assert len(tensors) == 2 * 2 * (ENCODER + 2 * DECODER)


@pytest.mark.parametrize("prefix", [0, 1, SEQ])
def test_each_side_has_at_least_one_token_whatever_marks_say(cache, prefix):
    stages = stages_of(source_of("t5", cache), 3)
    ids = rows(12, 12)[0][..., 0]
    asked = torch.full((2,), prefix)

    found = chain(stages, with_marks(ids, {"prefix": asked}))

    assert found.shape == (2, SEQ, VOCAB)
    assert torch.isfinite(found).all()
    assert torch.equal(found, chain(stages, with_marks(ids, {"prefix": asked.clamp(1)})))
    # rows without marks are those of which the encoder has as little as can be
    assert prefix > 1 or torch.equal(found, chain(stages, ids))


def test_marks_of_a_liar_are_read_as_some_border(cache):
    stages = stages_of(source_of("t5", cache), 3)
    sent = stages[0](rows(12, 12)[0])
    sent[..., -1] = torch.nan
    sent[0, :, -1] = 1e30

    found = stages[2](stages[1](sent))

    assert found.shape == (2, SEQ, VOCAB)


def test_a_message_without_room_for_tokens_is_refused(cache):
    stage = stages_of(source_of("t5", cache), 3)[1]

    with pytest.raises(ModelError, match="without tokens"):
        stage(torch.zeros(2, 2, 33))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id: found None; expected a token, which is pad_token"),
        ({"decoder_start_token_id": VOCAB}, "decoder_start_token_id: found 61"),
    ],
)
def test_what_stages_cannot_carry_is_refused_by_name(cache, change, said):
    with pytest.raises(ModelError, match=said):
        source_of("t5", cache, **change)


def test_half_a_model_another_head_and_other_attention_are_refused(cache):
    source = source_of("t5", cache)

    with pytest.raises(ModelError, match=r"model\.layers: t5 is an encoder and a decoder"):
        source.with_first_blocks(2)
    with pytest.raises(ModelError, match="t5 has an encoder, and the head of it predicts a target"):
        source.with_head("lm_and_score")
    with pytest.raises(ModelError, match="t5: has no bidirectional attention"):
        stages_of(source, 1)[0](rows(3)[0][..., 0], AttentionPattern("bidirectional"))


@pytest.mark.parametrize("name", ["t5", "t5-1.1"])
def test_an_exported_model_is_read_by_transformers_as_the_one_that_it_is(cache, tmp_path, name):
    source = source_of(name, cache)

    export_model(Held(stages_of(source, 4)), source, tmp_path / "out", adapter=None)

    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["T5ForConditionalGeneration"]
    assert written["tie_word_embeddings"] is (name == "t5")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", local_files_only=True).eval()
    whole = rows(12, 12)[1]
    assert torch.equal(model(**whole).logits, whole_model(source).eval()(**whole).logits)
    again = ModelSource(tmp_path / "out")
    x = rows(12, 12)[0]
    assert torch.equal(chain(stages_of(again, 2), x), chain(stages_of(source, 3), x))


def test_a_head_of_its_own_that_the_files_lack_is_named(cache, tmp_path):
    source = source_of("t5", cache)
    written = json.loads((source.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"scale_decoder_outputs": False}))
    (tmp_path / WEIGHTS).write_bytes((source.directory / WEIGHTS).read_bytes())

    with pytest.raises(ModelError, match=r"tensor 'lm_head.weight' is missing"):
        stages_of(ModelSource(tmp_path), 2)
