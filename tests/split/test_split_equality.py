"""A sealed split computes what a plaintext one does, bit for bit, and what the uncut model does."""

import pytest
import torch
from split_scene import HIDDEN, LAYERS, SEQ, batch_of, make_scene, same, train

from phalanx.config.extras import has_bitsandbytes
from phalanx.data import IGNORE
from phalanx.errors import ConfigError, FailedBatchError
from phalanx.models import AttentionPattern, LoraConfig, StageSpec, build_stage, with_marks
from phalanx.objectives import causal_lm_loss
from phalanx.split import BackTrainer, FrontPart, build_back, cut_model, task_of
from phalanx.split.training.parts import FewBits, computing_in
from phalanx.split.training.task import NextToken
from phalanx.testing import SplitSimulator

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_sealed_and_plaintext_splits_have_the_same_losses_and_adapters(source, seed):
    sealed = SplitSimulator(make_scene(source, seed=seed))
    plain = SplitSimulator(make_scene(source, "plaintext", seed=seed))

    losses = train(sealed, 4, seed=seed)

    assert losses == train(plain, 4, seed=seed)
    assert same(sealed.copy_adapters(), plain.copy_adapters())
    assert sealed.measure_held_out(*batch_of(99)[1]) == plain.measure_held_out(*batch_of(99)[1])


def test_what_is_trained_moves_and_what_is_frozen_stays(source):
    simulator = SplitSimulator(make_scene(source))
    before, frozen = simulator.copy_adapters(), dict(simulator.enclave.trainer.back.all_parameters())
    kept = {name: value.detach().clone() for name, value in frozen.items() if name not in before}

    train(simulator, 2)

    after = simulator.copy_adapters()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in after)
    assert not any(torch.equal(before[name], after[name]) for name in after if ".lora_B." in name)
    assert same(kept, {name: frozen[name].detach() for name in kept})


@pytest.mark.parametrize("cut", range(1, LAYERS))
def test_both_parts_together_are_the_uncut_model(source, cut):
    ids, labels = batch_of(0)[0]
    spec = StageSpec(0, 1, 0, LAYERS)
    whole = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    back = build_back(source, cut, adapter=LoraConfig(rank=2))
    whole.eval()
    back.eval()

    hidden = FrontPart(source, cut)(ids)

    assert hidden.shape == (1, SEQ, HIDDEN)
    assert causal_lm_loss(back(hidden), labels)[0].item() == causal_lm_loss(whole(ids), labels)[0].item()


def documents_of(ids):
    """Three documents in each row, the second one of a single token."""
    return (torch.arange(ids.shape[1]) >= 3).long().add((torch.arange(ids.shape[1]) >= 4).long()).expand(ids.shape)


def test_both_parts_together_attend_inside_documents_as_the_uncut_model_does(source):
    ids, labels = batch_of(0)[1]
    pattern = AttentionPattern("documents", documents=documents_of(ids))
    spec = StageSpec(0, 1, 0, LAYERS)
    whole = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    back = build_back(source, 2, adapter=LoraConfig(rank=2), document_attention=True)
    whole.eval()
    back.eval()

    hidden = FrontPart(source, 2, document_attention=True)(with_marks(ids, {"documents": pattern.documents}))

    assert hidden.shape == (1, SEQ, HIDDEN + 1)
    within = causal_lm_loss(back(hidden), labels)[0].item()
    assert within == causal_lm_loss(whole(ids, pattern), labels)[0].item()
    assert within != causal_lm_loss(whole(ids), labels)[0].item()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_sealed_and_plaintext_splits_attend_inside_documents_alike(source, wire):
    changes = {"document_attention": True, "wire": wire}
    sealed = SplitSimulator(make_scene(source, **changes))
    plain = SplitSimulator(make_scene(source, "plaintext", **changes))
    batches = [
        [(with_marks(ids, {"documents": documents_of(ids)}), labels) for ids, labels in batch_of(step)]
        for step in (0, 1)
    ]

    losses = [sealed.step(batch).loss for batch in batches]

    assert losses == [plain.step(batch).loss for batch in batches]
    assert same(sealed.copy_adapters(), plain.copy_adapters())
    assert losses != [loss for loss, _ in train(SplitSimulator(make_scene(source, wire=wire)), 2)]


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16"}, {"dora": True}, pytest.param({"quantize": "nf4"}, marks=NEEDS_QUANT)],
    ids=lambda changes: next(iter(changes)),
)
def test_adapters_and_precisions_of_all_kinds_are_sealed_without_loss_and_learn_as_the_uncut_model(source, changes):
    sealed = SplitSimulator(make_scene(source, **changes))
    plain = SplitSimulator(make_scene(source, "plaintext", **changes))
    losses = train(sealed, 3)

    assert losses == train(plain, 3)
    assert same(sealed.copy_adapters(), plain.copy_adapters())
    # both parts have the bits of an uncut model in as few bits, and others than those of float32
    adapter = LoraConfig(rank=2, quantize=changes.get("quantize"), dora=changes.get("dora", False))
    few_bits = FewBits(changes.get("precision", "fp32"), adapter.quantize)
    spec = StageSpec(0, 1, 0, LAYERS)
    whole = build_stage(source, spec, adapter=adapter, activation_checkpointing=False, attention="sdpa", seed=0).eval()
    front, back = FrontPart(source, 2, few_bits=few_bits), build_back(source, 2, adapter=adapter).eval()
    ids, _ = batch_of(0)[1]
    with torch.no_grad(), computing_in(few_bits.precision):
        logits = [back(front(ids)), whole(ids)]
    assert torch.equal(*logits)
    assert losses != train(SplitSimulator(make_scene(source)), 3)


def test_what_is_measured_of_the_back_part_is_in_float32_whatever_it_learns_in(source):
    back = build_back(source, 2, adapter=LoraConfig(rank=2))
    hidden, labels = FrontPart(source, 2)(batch_of(0)[1][0]), batch_of(0)[1][1]
    scores = [
        BackTrainer(back, NextToken(), make_scene(source).optimizer, 20, precision=precision).measure_microbatch(
            hidden, labels
        )
        for precision in ("fp32", "bf16")
    ]

    assert scores[0] == scores[1]


@pytest.mark.parametrize("cut", [0, LAYERS, -1])
def test_a_cut_that_leaves_a_part_without_a_layer_is_refused(cut):
    with pytest.raises(ConfigError, match=rf"split.cut = {cut}: the model has {LAYERS} layers"):
        cut_model(LAYERS, cut)


def test_a_step_is_that_of_the_mean_over_all_targets_however_they_are_spread(source):
    scene = make_scene(source)
    back = build_back(source, 2, adapter=scene.adapter)
    trainer = BackTrainer(back, NextToken(), scene.optimizer, scene.total_steps)
    front, batch = FrontPart(source, 2), batch_of(0)

    losses = [trainer.learn_microbatch(front(ids), labels) for ids, labels in batch]
    norm = trainer.step()

    assert [count for _, count in losses] == [SEQ - 2, SEQ, SEQ, SEQ]
    assert trainer.num_steps == 1
    assert norm > 0


def test_a_batch_without_a_target_and_one_that_is_not_finite_change_nothing(source):
    simulator = SplitSimulator(make_scene(source))
    nothing = [(ids, torch.full_like(labels, IGNORE)) for ids, labels in batch_of(0)]
    before = simulator.copy_adapters()

    with pytest.raises(FailedBatchError):
        simulator.step(nothing)

    assert same(before, simulator.copy_adapters())
    assert simulator.enclave.trainer.num_steps == 0
    fresh = SplitSimulator(make_scene(source))
    assert train(simulator, 2) == train(fresh, 2)


def test_each_client_is_told_the_losses_of_its_own_microbatches_only(source):
    simulator = SplitSimulator(make_scene(source))
    told = {}
    for name, client in simulator.clients.items():
        read = client.read_feedback
        client.read_feedback = lambda *given, read=read, name=name: told.setdefault(name, read(*given))

    step = simulator.step(batch_of(0))

    assert [len(told[name].losses) for name in ("client-0", "client-1")] == [2, 2]
    assert told["client-0"].losses[0][1] == SEQ - 2
    total = sum(loss for one in told.values() for loss, _ in one.losses)
    assert total / step.num_targets == pytest.approx(step.loss)


def test_half_the_precision_is_half_the_bytes_and_no_longer_the_same_bits(source):
    full, half = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source, wire="bf16"))

    first, second = full.step(batch_of(0)), half.step(batch_of(0))

    assert first.bytes_crossed - second.bytes_crossed == 4 * SEQ * HIDDEN * 2 + 16 * (4 * 4)
    assert first.loss != second.loss
    assert first.loss == pytest.approx(second.loss, rel=1e-2)


def test_after_a_new_meeting_the_run_goes_on_as_if_nothing_had_been(source):
    simulator, undisturbed = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source))
    losses = train(simulator, 2)

    simulator.meet_clients()

    assert [*losses, *train(simulator, 2, first=2)] == train(undisturbed, 4)
    assert same(simulator.copy_adapters(), undisturbed.copy_adapters())


def test_what_weighs_rows_in_training_has_no_part_in_a_measurement(source):
    weighted, plain = (
        SplitSimulator(make_scene(source), task_of(kind, 0)) for kind in ("weighted_causal_lm", "causal_lm")
    )
    batch = batch_of(0)
    nothing = [{"weights": torch.zeros(labels.shape)} for _, labels in batch]

    found = weighted.measure_held_out(*batch[0])

    assert found == plain.measure_held_out(*batch[0])
    assert weighted.step(batch, nothing).loss == 0.0
