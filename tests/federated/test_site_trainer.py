"""A site's trainer on a real model: rounds of one step are SGD on the union, and a round is the same again."""

import re

import pytest
import torch
from rounds_scene import Scene
from safetensors.torch import load_file

from phalanx.data import Batch, BatchLoader
from phalanx.errors import CheckpointError, ConfigError, FailedBatchError
from phalanx.federated.algorithms import ALGORITHMS, PlainRule
from phalanx.federated.site_trainer import Learning, SiteData, SiteSchedule, SiteTrainer, WholeModel
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.objectives import causal_lm_loss
from phalanx.optimizers import OptimizerConfig
from phalanx.planner.model.optimizers import OPTIMIZERS, OptimizerFacts

SGD = OptimizerConfig(kind="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, clip_norm=None, schedule="constant")
ARCHITECTURE = {
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_positions": 8,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8,
    "pad_token_id": None,
    "router_aux_loss_coef": 0.5,
}


class Rows:
    """Made sequences."""

    digest = "0" * 64
    num_train_sequences = 12

    def train_batch(self, indices):
        draw = torch.Generator().manual_seed(5)
        rows = torch.randint(0, 40, (12, 9), generator=draw)[list(indices)]
        return Batch(rows[:, :-1].clone(), rows[:, 1:].clone(), tuple(indices))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = ModelConfig(from_scratch=True, architecture=ARCHITECTURE)
    return open_model(config, tmp_path_factory.mktemp("models"), 3)


def model_of(source, adapter=None, **more) -> WholeModel:
    config = ModelConfig(from_scratch=True, architecture=ARCHITECTURE, adapter=adapter)
    return WholeModel(source, config, 3, Learning(), **{"frozen_a": False, **more})


def data_of(name: str, share, size: int) -> SiteData:
    rows = Rows()
    own = range(share[0], rows.num_train_sequences, share[1])
    return SiteData(
        name,
        BatchLoader(rows, size, 1, share),
        len(own),
        lambda: [rows.train_batch(range(4))],
        lambda numbers: rows.train_batch([own[one] for one in numbers]),
        rows.digest,
    )


def trainer_of(model: WholeModel, name: str, share, size: int, optimizer=SGD, steps=1, own=None) -> SiteTrainer:
    data = data_of(name, share, size)
    return SiteTrainer(model, data, SiteSchedule(optimizer, steps, size, 2, 7), own)


def test_fedavg_with_one_step_of_sgd_is_one_process_on_the_union(tmp_path, source):
    shares = [(number, 3) for number in range(3)]
    sites = [trainer_of(model_of(source), f"site-{number}", share, 4) for number, share in enumerate(shares)]
    scene = Scene.of_trainers(tmp_path, sites, model_of(source).copy_weights())

    for number in (1, 2):
        scene.owner.run_round(number, 0.1)

    alone = model_of(source)
    union = trainer_of(alone, "union", (0, 1), 12)
    weights = alone.copy_weights()
    for number in (1, 2):
        delta = union.train_round(number, weights, 0.1, PlainRule(None, weights)).delta
        weights = {name: one + delta[name] for name, one in weights.items()}
    for name, one in weights.items():
        torch.testing.assert_close(scene.owner.weights[name], one, rtol=1e-6, atol=1e-6)


def test_a_further_optimizer_of_the_table_trains_a_site_by_its_own_rule(source, monkeypatch):
    def moments(shape):
        return dict.fromkeys(("exp_avg", "exp_inf"), shape)

    facts = OptimizerFacts("Adamax", ("lr", "betas", "eps"), ("exp_avg", "exp_inf"), moments, fused="never")
    monkeypatch.setitem(OPTIMIZERS, "adamax", facts)
    weights = model_of(source).copy_weights()
    site = trainer_of(model_of(source), "site-0", (0, 3), 2, SGD.model_copy(update={"kind": "adamax"}))

    delta = site.train_round(1, weights, 0.01, PlainRule(None, weights)).delta

    # its first step is the rate in every number that has a gradient, whatever the size of the gradient
    moved = torch.cat([change.flatten() for change in delta.values()]).abs()
    torch.testing.assert_close(moved[moved > 0].median(), torch.tensor(0.01), rtol=1e-3, atol=0.0)
    assert float(moved.max()) <= 0.01 * 1.001


@pytest.mark.parametrize("optimizer", [SGD.model_copy(update={"momentum": 0.9}), OptimizerConfig(lr=1e-2)])
def test_a_site_that_has_missed_rounds_gives_the_same_update(source, optimizer):
    weights = model_of(source).copy_weights()
    steady, late = (trainer_of(model_of(source), "site-0", (0, 3), 2, optimizer, steps=3) for _ in range(2))
    steady.train_round(1, weights, 0.01, PlainRule(None, weights))

    one, other = (site.train_round(2, weights, 0.01, PlainRule(None, weights)) for site in (steady, late))

    assert all(torch.equal(one.delta[name], other.delta[name]) for name in weights)
    assert max(float(delta.abs().max()) for delta in one.delta.values()) > 0


def test_a_frozen_factor_is_neither_trained_nor_sent(source):
    lora = LoraConfig(rank=2, alpha=4.0, dropout=0.0)
    both, frozen = model_of(source, lora), model_of(source, lora, frozen_a=True)

    assert {name for name in both.trained if ".lora_A." in name} == set(frozen.copy_frozen())
    assert not any(".lora_A." in name for name in trainer_of(frozen, "site-0", (0, 3), 2).trained_shapes())


def test_a_loss_that_is_no_number_is_no_update(source):
    model = model_of(source)
    weights = {name: torch.full_like(one, float("inf")) for name, one in model.copy_weights().items()}

    with pytest.raises(FailedBatchError):
        trainer_of(model, "site-0", (0, 3), 2).train_round(1, weights, 0.1, ALGORITHMS["fedavg"].local(None, weights))


PERSONAL = ("transformer.ln_f.*", "*.h.1.ln_2.weight")
STAY = {"transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.h.1.ln_2.weight"}


def personal_model(source) -> WholeModel:
    model = model_of(source)
    model.make_personal(PERSONAL)
    return model


@pytest.mark.parametrize("algorithm", [{"kind": "fedprox", "mu": 0.1}, {"kind": "scaffold"}])
def test_personal_weights_are_trained_at_each_site_and_are_in_no_message(tmp_path, source, algorithm):
    def site(number):
        return trainer_of(personal_model(source), f"site-{number}", (number, 3), 4, own=tmp_path / f"own-{number}")

    scene = Scene.of_trainers(
        tmp_path, [site(number) for number in range(3)], personal_model(source).copy_weights(), algorithm=algorithm
    )
    sent = []
    for name, answer in scene.carrier.sites.items():
        scene.carrier.sites[name] = lambda order, payload, answer=answer: (
            sent.append(bytes(payload)),
            answer(order, payload),
        )[1]

    for number in (1, 2):
        scene.owner.run_round(number, 0.1)
    own_scores = scene.owner.measure_at_sites()

    messages = [*sent, *(bytes(one.payload) for one in scene.carrier.replies)]
    assert any(b"transformer.wte.weight" in one for one in messages)
    assert not any(name.encode() in one for one in messages for name in STAY)
    kept = [load_file(tmp_path / f"own-{number}" / "personal" / "round-2.safetensors") for number in range(3)]
    first = model_of(source).copy_weights()
    assert {frozenset(one) for one in kept} == {frozenset(STAY)}
    # each site's are its own, and none of them is found among what was sent by its bytes
    assert len({one["transformer.ln_f.weight"].numpy().tobytes() for one in kept} | {b""}) == 4
    assert not any(torch.equal(one["transformer.ln_f.weight"], first["transformer.ln_f.weight"]) for one in kept)
    assert not any(one["transformer.ln_f.weight"].numpy().tobytes() in message for one in kept for message in messages)
    # a site measures with its own: a site that has lost them says something else
    (tmp_path / "own-0" / "personal" / "round-2.safetensors").unlink()
    (tmp_path / "own-0" / "personal" / "round-1.safetensors").unlink()
    assert scene.owner.measure_at_sites()["site-0"].loss != own_scores["site-0"].loss
    assert scene.owner.measure_at_sites()["site-1"] == own_scores["site-1"]


def test_without_patterns_the_same_weights_are_sent(source):
    model = model_of(source)
    model.make_personal(())

    assert set(model.trained) > STAY and not model.personal


def test_a_site_that_begins_anew_goes_on_with_its_personal_weights_and_a_round_that_is_done_again_is_the_same(
    tmp_path, source
):
    def site():
        return trainer_of(personal_model(source), "site-0", (0, 3), 4, own=tmp_path)

    weights = personal_model(source).copy_weights()
    rule = PlainRule(None, weights)
    steady = site()
    steady.train_round(1, weights, 0.1, rule)
    second = steady.train_round(2, weights, 0.1, rule)
    steady.train_round(3, weights, 0.1, rule)

    again = site().train_round(2, weights, 0.1, rule)

    assert all(torch.equal(second.delta[name], again.delta[name]) for name in weights)
    assert not (tmp_path / "personal" / "round-3.safetensors").exists()
    (tmp_path / "personal" / "round-2.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        site().train_round(3, weights, 0.1, rule)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("head.*",), '"head.*" matches no trained weight; weights: transformer.h.0'),
        (("*",), "sites would share none"),
    ],
)
def test_patterns_that_mean_nothing_or_everything_are_refused(source, patterns, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        model_of(source).make_personal(patterns)


def test_personal_weights_without_a_place_are_refused(source):
    with pytest.raises(ConfigError, match="no directory for its personal weights"):
        trainer_of(personal_model(source), "site-0", (0, 3), 4)


def gradients_of_routers(cache, *, asked: bool, share: float = 0.0):
    """Those of a site's step of two microbatches; and by the model itself, with a share of each microbatch."""
    architecture = MIXTURE | {"output_router_logits": asked}
    config = ModelConfig(from_scratch=True, architecture=architecture)
    source = open_model(config, cache, 3)
    model, batch = WholeModel(source, config, 3, Learning(), frozen_a=False), Rows().train_batch(range(4))
    site = model.compute_gradient(batch, 2)[0]
    stage = model.torch_module
    stage.router_share = share
    for part in batch.split_microbatches(2):
        (causal_lm_loss(stage(part.input_ids), part.labels)[0] / batch.labels.numel()).backward()
    return [
        {name: gradients[name] for name in gradients if name.endswith("mlp.gate.weight")}
        for gradients in (site, model.take_gradients())
    ]


def test_routers_of_a_site_learn_their_own_losses(tmp_path):
    site, expected = gradients_of_routers(tmp_path, asked=True, share=1 / 2)
    _, plain = gradients_of_routers(tmp_path, asked=False)

    assert len(site) == 2
    for name, gradient in site.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.allclose(gradient, plain[name], rtol=1e-2, atol=1e-4)
