"""A classification head in the place of the language model's: trained in the enclave, nowhere else."""

import pytest
import torch
from torch import nn

from phalanx.errors import DataError, ModelError
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.objectives import mark_classes
from phalanx.optimizers import OptimizerConfig
from phalanx.split import BackTrainer, Classification, SplitConfig, build_back
from phalanx.testing import SplitScenario, SplitSimulator

ARCHITECTURE = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 31,
    "n_positions": 8,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
IDS, ONE_LABEL = torch.ones(1, 4, dtype=torch.int64), mark_classes([1], [4], 4)
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_model(ModelConfig(from_scratch=True, architecture=ARCHITECTURE), tmp_path_factory.mktemp("m"), seed=1)


def back_of(source):
    return build_back(source, 1, adapter=LoraConfig(rank=2), seed=0)


def test_a_fresh_head_gives_every_class_the_same_chance(source):
    back, task = back_of(source), Classification(5)
    task.put_head(back)

    logits = back(torch.randn(2, 3, 16))

    assert logits.shape == (2, 3, 5)
    assert not logits.any()


def test_head_and_adapters_are_trained_and_nothing_else(source):
    back = back_of(source)
    trainer = BackTrainer(back, Classification(3), OPTIMIZER, 10)
    before = {name: value.detach().clone() for name, value in back.all_parameters().items()}

    for _ in range(2):
        trainer.learn_microbatch(
            torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)), mark_classes([0, 2], [4, 2], 4)
        )
        trainer.step()

    moved = {name for name, value in back.all_parameters().items() if not torch.equal(value, before[name])}
    assert moved == set(trainer.trained_parameters)
    assert {"lm_head.weight", "lm_head.bias"} < moved
    assert all("lora" in name for name in moved - {"lm_head.weight", "lm_head.bias"})


def test_a_prediction_does_not_look_at_the_label(source):
    back, task = back_of(source), Classification(3)
    task.put_head(back)
    nn.init.normal_(back.get_parameter("lm_head.weight"), generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))

    found = [task.predict_classes(back, hidden, mark_classes([label] * 6, [4] * 6, 4)) for label in range(3)]

    assert found[0] == found[1] == found[2]
    assert back.training


def test_the_split_engine_trains_it(source):
    config = SplitConfig(cut=1, clients=2, allow_insecure_sim=True)
    scene = SplitScenario(source, config, LoraConfig(rank=2), OPTIMIZER, rows=2, seq=4, microbatches=2, total_steps=8)
    simulator = SplitSimulator(scene, Classification(2))
    ids = torch.tensor([[1, 2, 3, 4], [11, 12, 13, 14]])
    batch = [(ids, mark_classes([0, 1], [4, 3], 4))] * 2

    losses = [simulator.step(batch).loss for _ in range(8)]

    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.5


def test_a_front_that_is_given_is_the_one_that_runs(source):
    config = SplitConfig(mode="plaintext", insecure=True, cut=1, clients=1, allow_insecure_sim=True)
    scene = SplitScenario(source, config, LoraConfig(rank=2), OPTIMIZER, rows=1, seq=4, microbatches=1, total_steps=1)
    asked = []

    def front(ids):
        asked.append(ids)
        return torch.zeros(1, 4, 16)

    SplitSimulator(scene, Classification(2), front=front).step([(IDS, ONE_LABEL)])

    assert len(asked) == 1


def test_a_label_that_is_no_class_is_refused(source):
    trainer = BackTrainer(back_of(source), Classification(2), OPTIMIZER, 1)

    with pytest.raises(DataError, match=r"outside 0 \.\. 1"):
        trainer.learn_microbatch(torch.zeros(1, 4, 16), mark_classes([2], [4], 4))


def test_one_class_is_no_classification():
    with pytest.raises(ModelError, match="expected 2 or more"):
        Classification(1)
