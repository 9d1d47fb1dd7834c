"""A classification over the enclave's own loop: the same bits whatever carries it, answers, crashes, adapters."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from split_house import House
from split_scene import SEQ, VOCAB, make_scene, same

from phalanx.models import LoraConfig, PrefixConfig, SpfConfig
from phalanx.objectives import mark_classes
from phalanx.split import Classification
from phalanx.split.channel.client_order import client_of
from phalanx.split.masked import MaskedConfig, MaskingClient, SimulatedWorker, mask_linears, process_pads
from phalanx.testing import SplitSimulator

CLASSES = 3
ADAPTERS = [LoraConfig(rank=2), SpfConfig(kind="spf", share=0.5), PrefixConfig(kind="ptuning", tokens=2)]
TOKENS = SEQ - 2
"""Virtual tokens take positions."""


def texts_of(step, rows=1):
    """Four microbatches of texts with a first token that gives their class away."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(4):
        classes = torch.randint(0, CLASSES, (rows,), generator=generator).tolist()
        ids = torch.randint(CLASSES, VOCAB, (rows, SEQ), generator=generator)
        ids[:, 0] = torch.tensor(classes)
        found.append((ids, mark_classes(classes, [TOKENS] * rows, SEQ)))
    return found


def classifying(source, directory, mode="sealed"):
    house = House(source, directory, mode)
    house.objective, house.classes = "classification", CLASSES
    return house


def simulated(source, mode="sealed"):
    return SplitSimulator(make_scene(source, mode), Classification(CLASSES))


def test_a_session_learns_what_the_simulator_learns_and_answers_what_it_answers(source, tmp_path):
    simulator = simulated(source)
    with classifying(source, tmp_path).open() as session:
        losses = [session.train_turn(number, texts_of(number)) for number in range(4)]
        held_out = texts_of(99, rows=5)
        measured = session.lead.measure_held_out(4, iter(held_out))
        weights = dict(session.server._trainer.trained_weights())

    expected = [simulator.step(texts_of(number)) for number in range(4)]
    assert losses == [(one.loss, one.norm) for one in expected]
    assert same(weights, simulator.copy_adapters())
    answers = [
        simulator.measure_held_out(*batch, client=client_of(at, ("client-0", "client-1"))).answers
        for at, batch in enumerate(held_out)
    ]
    assert measured.answers == tuple(answer for part in answers for answer in part)
    assert (len(measured.answers), measured.targets) == (20, 20)


def test_sealed_and_plaintext_classifications_are_the_same_bits(source):
    sealed, plain = simulated(source), simulated(source, "plaintext")

    for number in range(3):
        assert sealed.step(texts_of(number)).loss == plain.step(texts_of(number)).loss
    assert same(sealed.copy_adapters(), plain.copy_adapters())
    assert sealed.measure_held_out(*texts_of(9)[0]) == plain.measure_held_out(*texts_of(9)[0])


@pytest.mark.quick_cases("lora")
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: one.kind)
def test_with_every_adapter_the_classes_are_learned(source, adapter):
    scene = replace(make_scene(source), adapter=adapter, seq=TOKENS)
    simulator = SplitSimulator(scene, Classification(CLASSES))
    start = simulator.copy_adapters()

    losses = [
        simulator.step([(ids[:, :TOKENS], labels[:, :TOKENS]) for ids, labels in texts_of(number % 6)]).loss
        for number in range(20)
    ]

    assert losses[0] == pytest.approx(1.0986, abs=1e-3)
    assert fmean(losses[-6:]) < fmean(losses[:6]) - 0.02
    assert not any(torch.equal(value, start[name]) for name, value in simulator.copy_adapters().items())
    assert {"lm_head.weight", "lm_head.bias"} < set(simulator.copy_adapters())


def test_head_and_moments_survive_a_crash_bit_for_bit(source, tmp_path):
    simulator = simulated(source)
    undisturbed = [simulator.step(texts_of(number)) for number in range(4)]
    house = classifying(source, tmp_path)
    session = house.open()
    losses = [session.train_turn(number, texts_of(number)) for number in range(2)]
    step, number, blob = session.lead.request_state()
    kept = bytes(blob)
    session.lead.settle_state(number)
    session.die()

    with house.open() as again:
        again.lead.restore_state(step, memoryview(kept))
        losses += [again.train_turn(number, texts_of(number)) for number in range(2, 4)]
        weights = dict(again.server._trainer.trained_weights())

    assert losses == [(one.loss, one.norm) for one in undisturbed]
    assert same(weights, simulator.copy_adapters())


def test_a_masked_classification_gives_the_worker_no_head(source, tmp_path):
    house = classifying(source, tmp_path, "masked")
    masked = []

    def prepare(back):
        offload = MaskingClient(SimulatedWorker(), process_pads("test"), MaskedConfig(rows=SEQ))
        masked.extend(mask_linears(back, offload))

    house.prepare = prepare
    plain = simulated(source)
    with house.open() as session:
        loss, _ = session.train_turn(0, texts_of(0))
        loss, _ = session.train_turn(1, texts_of(1))
    plain.step(texts_of(0))

    assert masked and not any("lm_head" in name for name in masked)
    assert loss == pytest.approx(plain.step(texts_of(1)).loss, rel=1e-3)
