"""What a site learns beside plain text in float32: each update is that of an ordinary loop of torch."""

from dataclasses import replace

import pytest
import torch
from rounds_scene import Scene
from test_site_trainer import ARCHITECTURE, SGD, Rows

from phalanx.config.extras import has_bitsandbytes
from phalanx.data import DOCUMENTS, PREFIX, Batch, BatchLoader, without_attention
from phalanx.federated.algorithms import PlainRule
from phalanx.federated.site_trainer import Learning, SiteData, SiteSchedule, SiteTrainer, WholeModel
from phalanx.models import LoraConfig, ModelConfig, StageSpec, add_embedding_noise, build_stage, open_model, with_marks
from phalanx.models.config import PromptEncoderConfig
from phalanx.objectives import IGNORE, objective_of
from phalanx.objectives.pairs import REFERENCE, row_log_probs
from phalanx.optimizers import OptimizerConfig
from phalanx.optimizers.few_bits import AdamW8bit

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
LORA = LoraConfig(rank=2, alpha=4.0, dropout=0.0)
LONGER = {**ARCHITECTURE, "n_positions": 12}
"""With room for virtual tokens."""
RATE = 0.1


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = ModelConfig(from_scratch=True, architecture=LONGER)
    return open_model(config, tmp_path_factory.mktemp("models"), 3)


def whole(source, learning, adapter=None):
    config = ModelConfig(from_scratch=True, architecture=LONGER, adapter=adapter)
    return WholeModel(source, config, 3, learning, frozen_a=False)


def stage_of(source, adapter=None):
    return build_stage(
        source,
        StageSpec(0, 1, 0, source.num_layers),
        adapter=adapter,
        activation_checkpointing=False,
        attention="sdpa",
        seed=3,
    )


class MarkedRows(Rows):
    """Made sequences that say which tokens see which."""

    def __init__(self, name):
        draw = torch.Generator().manual_seed(8)
        documents = (torch.rand((12, 8), generator=draw) < 0.4).cumsum(1)
        self.marks = {name: documents if name == DOCUMENTS else torch.randint(1, 7, (12,), generator=draw)}

    def train_batch(self, indices):
        batch = super().train_batch(indices)
        return replace(batch, extras={name: rows[list(indices)] for name, rows in self.marks.items()})


class PairRows(Rows):
    """Six made pairs: the first row of each is better; a model before training is the reference of both."""

    num_train_sequences = 6

    def __init__(self, source):
        batch = super().train_batch(range(12))
        self.labels = batch.labels.clone()
        self.labels[:, :3] = IGNORE
        with torch.no_grad():
            self.reference = row_log_probs("reference", stage_of(source)(batch.input_ids), self.labels).total

    def train_batch(self, indices):
        rows = [2 * pair + side for pair in indices for side in (0, 1)]
        batch = super().train_batch(rows)
        return Batch(batch.input_ids, self.labels[rows], tuple(rows), {REFERENCE: self.reference[rows]})


def data_of(rows, size, name="site-0", share=(0, 1)):
    own = range(share[0], rows.num_train_sequences, share[1])

    def pick(numbers):
        return rows.train_batch([own[number] for number in numbers])

    loader = BatchLoader(rows, size, 1, share)
    return SiteData(name, loader, len(own), lambda: [rows.train_batch(own)], pick, rows.digest)


def trainer_of(model, data, optimizer=SGD, steps=1, size=6):
    return SiteTrainer(model, data, SiteSchedule(optimizer, steps, size, 2, 7))


def update_of(model, data, rate=RATE, **more):
    weights = model.copy_weights()
    return trainer_of(model, data, **more).train_round(1, weights, rate, PlainRule(None, weights))


def gradients_of(stage, learning, batch):
    """The mean gradient of a batch in one piece."""
    objective = objective_of(learning.objective)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=learning.precision == "bf16"):
        logits = stage(with_marks(batch.input_ids, batch.extras))
    loss, targets = objective(logits, batch.labels, without_attention(batch.extras))
    (loss / targets).backward()
    return {name: parameter.grad for name, parameter in stage.trainable_parameters().items()}


PREFIXES = PromptEncoderConfig(kind="prompt_encoder", tokens=2)
CASES = {
    "bf16": (Learning(precision="bf16"), None, lambda source: Rows(), 3e-2),
    "documents": (Learning(attends="documents"), None, lambda source: MarkedRows(DOCUMENTS), 1e-5),
    "prefix_lm": (Learning("prefix_lm", attends="prefix"), None, lambda source: MarkedRows(PREFIX), 1e-5),
    "dpo": (Learning("dpo"), None, PairRows, 1e-5),
    "prompt_encoder": (Learning(), PREFIXES, lambda source: Rows(), 1e-5),
    "neftune": (Learning(neftune_alpha=5.0), None, lambda source: Rows(), 1e-5),
    "nf4": (Learning(), LORA.model_copy(update={"quantize": "nf4"}), lambda source: Rows(), 1e-5),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_QUANT if name == "nf4" else ()) for name in CASES])
def test_one_step_of_a_site_is_one_step_of_a_plain_loop(source, name):
    learning, adapter, make_rows, tolerance = CASES[name]
    rows = make_rows(source)
    batch = data_of(rows, 6).loader.next_batch()
    stage = stage_of(source, adapter)
    stage.attends = learning.attends
    add_embedding_noise(stage, learning.neftune_alpha)
    if stage.embedding_noise is not None:
        stage.embedding_noise.begin_step(7, 0)

    # far enough that the rounding of weights is nothing beside it
    found = update_of(whole(source, learning, adapter), data_of(rows, 6), rate=10.0)

    expected = {name: -10.0 * gradient for name, gradient in gradients_of(stage, learning, batch).items()}
    assert found.delta.keys() == expected.keys() and found.num_targets
    size = max(float(one.norm()) for one in expected.values())
    assert size > 1e-4
    for name, one in expected.items():
        assert float((found.delta[name] - one).norm()) <= tolerance * size


def test_a_site_that_ignores_marks_would_give_another_update(source):
    rows = MarkedRows(DOCUMENTS)
    inside, across = (
        update_of(whole(source, Learning(attends=kind)), data_of(marked, 6))
        for kind, marked in (("documents", rows), ("causal", Rows()))
    )

    assert not torch.allclose(inside.delta["transformer.wte.weight"], across.delta["transformer.wte.weight"])


def test_masters_take_updates_that_bf16_weights_would_lose(source):
    model = whole(source, Learning(precision="bf16_weights"))
    name = "transformer.h.0.attn.c_attn.weight"
    before = model.copy_weights()

    found = update_of(model, data_of(Rows(), 6), optimizer=SGD.model_copy(update={"lr": 1e-3}))
    plain = update_of(whole(source, Learning()), data_of(Rows(), 6))

    assert found.delta[name].dtype == before[name].dtype == torch.float32
    # an update is that of float32 up to the products' rounding, and far below the last place of most weights
    assert float((found.delta[name] - plain.delta[name]).norm()) < 0.05 * float(plain.delta[name].norm())
    rounded = before[name].to(torch.bfloat16)
    narrow = rounded + (1e-3 * found.delta[name]).to(torch.bfloat16)
    assert float((narrow == rounded).float().mean()) > 0.9


@pytest.mark.parametrize("kind", ["adafactor", pytest.param("adamw8bit", marks=NEEDS_QUANT)])
def test_local_steps_of_other_optimizers_are_those_of_their_own_class(source, kind):
    steps, rows = 3, Rows()
    # Adam's first steps turn the rounding of tiny gradients into signs where eps is small
    more = {} if kind == "adafactor" else {"eps": 1e-3}
    config = OptimizerConfig(kind=kind, lr=RATE, weight_decay=0.1, clip_norm=None, schedule="constant", **more)
    stage = stage_of(source)
    data = data_of(rows, 6)
    decayed = [parameter for parameter in stage.trainable_parameters().values() if parameter.ndim >= 2]
    others = [parameter for parameter in stage.trainable_parameters().values() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    options = {} if kind == "adafactor" else {"betas": config.betas, "eps": config.eps}
    optimizer = (torch.optim.Adafactor if kind == "adafactor" else AdamW8bit)(groups, lr=RATE, **options)
    first = {name: parameter.detach().clone() for name, parameter in stage.trainable_parameters().items()}
    for batch in data.round_batches(1, steps, 6):
        gradients_of(stage, Learning(), batch)
        optimizer.step()
        optimizer.zero_grad()

    found = update_of(whole(source, Learning()), data_of(rows, 6), optimizer=config, steps=steps)

    for name, parameter in stage.trainable_parameters().items():
        away = (found.delta[name] - (parameter.detach() - first[name])).abs()
        assert float((away > 1e-4).float().mean()) < 0.01


def test_the_next_round_of_an_optimizer_begins_anew(source):
    config = OptimizerConfig(kind="adafactor", lr=RATE, schedule="constant")
    model, data = whole(source, Learning()), data_of(Rows(), 6)
    weights = model.copy_weights()
    steady = trainer_of(model, data, optimizer=config, steps=2)
    steady.train_round(1, weights, RATE, PlainRule(None, weights))
    late = trainer_of(whole(source, Learning()), data_of(Rows(), 6), optimizer=config, steps=2)

    one, other = (site.train_round(2, weights, RATE, PlainRule(None, weights)).delta for site in (steady, late))

    assert all(torch.equal(one[name], other[name]) for name in weights)


def pair_scene(home, source, rounds, **section):
    """Rounds of three sites, which have two pairs each, and their scores in the end."""
    rows = PairRows(source)
    sites = [
        trainer_of(whole(source, Learning("dpo")), data_of(rows, 2, f"site-{n}", (n, 3)), size=2) for n in range(3)
    ]
    scene = Scene.of_trainers(home, sites, whole(source, Learning()).copy_weights(), **section)
    before = scene.owner.measure_at_sites()
    for number in range(1, rounds + 1):
        scene.owner.run_round(number, 0.5)
    return scene, before, scene.owner.measure_at_sites()


def test_rounds_on_pairs_lower_every_sites_loss_and_a_masked_sum_of_them_is_the_mean(tmp_path, source):
    plain, before, after = pair_scene(tmp_path / "plain", source, 4)
    masked, _, _ = pair_scene(tmp_path / "masked", source, 4, secure=True, min_cohort=3, max_norm=10.0)

    for site, scores in before.items():
        assert scores.num_targets == after[site].num_targets == 2
        # the model is its own reference before the first round
        assert scores.loss / 2 == pytest.approx(0.6931, abs=1e-3)
        assert after[site].loss < scores.loss
    for name, one in plain.owner.weights.items():
        torch.testing.assert_close(masked.owner.weights[name], one, rtol=0, atol=1e-5)


def test_clipping_bounds_the_updates_of_sites_that_learn_pairs(tmp_path, source):
    scene, _, _ = pair_scene(tmp_path, source, 0, max_norm=1e-3)
    first = {name: one.clone() for name, one in scene.owner.weights.items()}

    scene.owner.run_round(1, 0.5)

    moved = torch.cat([(one - first[name]).flatten() for name, one in scene.owner.weights.items()])
    assert 0 < float(moved.norm()) <= 1e-3 * (1 + 1e-5)
