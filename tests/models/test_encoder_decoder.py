"""The chain of a T5's stages computes what transformers' T5 computes, encoder and decoder in one tensor."""

import pytest
import torch
from tiny_models import Held
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM

from phalanx.errors import ModelError
from phalanx.models import AttentionPattern, ModelConfig, ModelSource, build_stage, open_model, partition, tie, with_marks
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
    specs = partition(source.num_layers, count, None, 0.0, 0.0)
    stages = [
        build_stage(source, spec, adapter=adapter, activation_checkpointing=recompute, attention=attention, seed=5)
        for spec in specs
    ]
    tie(stages[0], stages[-1])
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
    (x, whole), found = rows(12, 12), []
    torch.manual_seed(1)
    expected = whole_model(drops)(**whole, use_cache=False).logits
    for recompute in (False, True):
        stages = stages_of(drops, 3, recompute=recompute)
        torch.manual_seed(1)
        logits = targets(chain(stages, x), (12, 12))
        assert torch.equal(logits, expected)
        loss_of(logits, whole["labels"]).backward()
        found.append(gradients(trained(stages)))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.parametrize("num_stages", [1, LAYERS])
@pytest.mark.parametrize("name", ["t5", "t5-1.1"])
def test_bf16_is_bit_equal_too(cache, name, num_stages):
    source = source_of(name, cache)

    assert_same(stages_of(source, num_stages), whole_model(source), (12, 12), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_counted_parameters_are_real_ones(cache, name):
    source = source_of(name, cache)

    assert shape_of(source.hub_config_dict).parameters == sum(p.numel() for p in whole_model(source).parameters())
