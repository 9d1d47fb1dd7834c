"""P-tuning: virtual tokens before the text are what peft makes of the same encoder, and its files go both ways."""

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import Held, build_all, chain, disturbed, lm_loss, named, some_ids, tiny_source, trained, whole_model

from late_imports import need_module
from phalanx.checkpoint.export import export_model
from phalanx.errors import CheckpointError, ModelError
from phalanx.models import ModelConfig, PromptEncoderConfig, StageSpec, stage_table
from phalanx.models.adapters.prompt import PROMPT_TABLE
from phalanx.planner import shape_of

peft = need_module("peft", "could not import peft")
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ["gpt2", "opt", "bloom", "llama", "falcon"]
MLP = PromptEncoderConfig(kind="prompt_encoder", tokens=5)
LSTM = PromptEncoderConfig(kind="prompt_encoder", tokens=5, encoder="lstm", encoder_size=12)
BARE = PromptEncoderConfig(kind="prompt_encoder", tokens=5, encoder="none")
KINDS = {"mlp": MLP, "lstm": LSTM, "none": BARE}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def of_peft(source, stages, adapter):
    """Peft's whole model with the same encoder, in training."""
    if adapter.encoder == "none":
        wanted = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=adapter.tokens)
    else:
        wanted = peft.PromptEncoderConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=adapter.tokens,
            encoder_reparameterization_type=adapter.encoder.upper(),
            encoder_hidden_size=adapter.encoder_size or source.hidden_size,
        )
    whole = peft.get_peft_model(whole_model(source), wanted)
    own = {name.removeprefix("prompt_encoder."): value.detach() for name, value in trained(stages).items()}
    whole.prompt_encoder["default"].load_state_dict(own)
    return whole.train()


@pytest.mark.quick_cases("*-gpt2", "mlp-*")
@pytest.mark.parametrize("family", FAMILIES)
@each_kind
def test_logits_loss_and_gradients_are_those_of_peft_on_the_whole_model(cache, family, kind):
    source, ids = tiny_source(family, cache), some_ids()
    stages = build_all(source, 2, adapter=KINDS[kind])
    whole = of_peft(source, stages, KINDS[kind])

    logits, theirs = chain(stages, ids), whole(ids).logits[:, 5:]
    lm_loss(logits, ids).backward()
    lm_loss(theirs, ids).backward()

    assert logits.shape[:2] == ids.shape
    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, chain(build_all(source, 2), ids), atol=1e-3)
    found = {f"prompt_encoder.{n}": p.grad for n, p in whole.prompt_encoder["default"].named_parameters()}
    assert found.keys() == trained(stages).keys()
    for name, value in trained(stages).items():
        torch.testing.assert_close(value.grad, found[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@each_kind
def test_stages_are_one_whole_bit_for_bit(cache, family, kind):
    source, ids = tiny_source(family, cache), some_ids()
    one, four = (build_all(source, n, adapter=KINDS[kind]) for n in (1, 4))

    lm_loss(chain(one, ids), ids).backward()
    lm_loss(chain(four, ids), ids).backward()

    assert trained(one).keys() == trained(four).keys() == set(trained(four[:1]))
    assert all(torch.equal(value.grad, trained(four)[name].grad) for name, value in trained(one).items())
    assert all(torch.equal(value, trained(four)[name]) for name, value in trained(one).items())


@each_kind
def test_encoder_and_embeddings_learn_and_nothing_else_does(cache, kind):
    source, ids = tiny_source("llama", cache), some_ids()
    stages = build_all(source, 2, adapter=KINDS[kind])
    before = {name: value.clone() for name, value in named(stages).items()}

    optimizer = torch.optim.AdamW(trained(stages).values(), lr=0.02)
    losses = []
    for _ in range(6):
        loss = lm_loss(chain(stages, ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    moved = {name for name, value in named(stages).items() if not torch.equal(value, before[name])}
    assert moved == set(trained(stages)) and PROMPT_TABLE in moved


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@each_kind
def test_files_load_in_peft_and_are_a_start_here_with_equal_logits(cache, family, kind, tmp_path):
    source, ids = tiny_source(family, cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=KINDS[kind]), 0.3)

    export_model(Held(stages), source, tmp_path / "adapter", adapter=KINDS[kind])

    adapted = peft.PeftModel.from_pretrained(whole_model(source), str(tmp_path / "adapter")).eval()
    start = BARE.model_copy(update={"path": str(tmp_path / "adapter")})
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits[:, 5:], chain(stages, ids), rtol=1e-5, atol=1e-6)
        assert torch.equal(chain(build_all(source, 2, adapter=start), ids), chain(stages, ids))
    with pytest.raises(CheckpointError, match="virtual tokens are not weights"):
        export_model(Held(stages), source, tmp_path / "merged", adapter=KINDS[kind], merge=True)


@each_kind
def test_what_peft_itself_has_saved_is_a_start(cache, kind, tmp_path):
    source, ids = tiny_source("llama", cache), some_ids()
    whole = of_peft(source, build_all(source, 1, adapter=KINDS[kind]), KINDS[kind])
    whole.save_pretrained(tmp_path / "theirs")

    stages = build_all(source, 2, adapter=BARE.model_copy(update={"path": str(tmp_path / "theirs")}))

    torch.testing.assert_close(chain(stages, ids), whole(ids).logits[:, 5:], rtol=1e-5, atol=1e-6)
    with pytest.raises(ModelError, match=r"model\.adapter\.tokens: found 4; .* has 5"):
        build_all(source, 1, adapter=BARE.model_copy(update={"path": str(tmp_path / "theirs"), "tokens": 4}))


@each_kind
def test_a_saved_state_comes_back_bit_for_bit_in_another_layout(cache, kind, tmp_path):
    source, ids = tiny_source("bloom", cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=KINDS[kind]), 0.3)
    save_file({name: value.detach().contiguous() for name, value in trained(stages).items()}, tmp_path / "state")

    other = build_all(source, 4, adapter=KINDS[kind], seed=9)
    for name, value in trained(other).items():
        value.detach().copy_(trained(stages)[name])

    assert torch.equal(chain(other, ids), chain(stages, ids))


@each_kind
def test_the_planner_counts_what_is_trained(cache, kind):
    source, adapter = tiny_source("llama", cache), KINDS[kind]

    first, last = stage_table(source.hub_config, (StageSpec(0, 2, 0, 2), StageSpec(1, 2, 2, 4)), adapter)

    hidden = shape_of(source.hub_config_dict, "model config").hidden
    assert (adapter.planner_adapter.prompt.num_parameters(hidden), 0) == (first.trainable, last.trainable)


def test_virtual_tokens_take_positions_of_a_model_that_has_few(cache):
    stages = build_all(tiny_source("gpt2", cache), 1, adapter=MLP)

    assert chain(stages, some_ids(seq=19)).shape[1] == 19
    with pytest.raises(ModelError, match="a sequence of 25 tokens, 5 of them virtual; the model has 24 pos"):
        chain(stages, some_ids(seq=20))


def test_what_cannot_be_carried_is_refused_by_name(cache):
    with pytest.raises(ModelError, match="opt: its embeddings are projected; take lora"):
        build_all(tiny_source("opt-post-norm", cache), 1, adapter=MLP)
    with pytest.raises(ValueError, match="path: files of peft hold the embeddings that an encoder made"):
        PromptEncoderConfig(kind="prompt_encoder", path="a")
    with pytest.raises(ValueError, match='encoder_size: encoder = "none" has no layers'):
        PromptEncoderConfig(kind="prompt_encoder", encoder="none", encoder_size=8)
    assert ModelConfig(path="a", adapter=MLP).sliced_adapter == MLP


def test_rows_that_cross_are_longer_by_the_virtual_tokens(cache):
    source = tiny_source("llama", cache)
    first, last = build_all(source, 2, adapter=MLP)
    ids = some_ids(seq=7)

    assert tuple(first(ids).shape) == first.hidden_shape(len(ids), 7) == (len(ids), 12, 32)
    assert last(first(ids)).shape[1] == 7
