"""Clients that lie about labels or activations: they win where nothing looks; with admission they are shut out."""

import math

import pytest
import torch
from remote_house import RemoteHouse, Texts
from split_scene import SEQ, VOCAB, same

from phalanx.errors import ConfigError, FailedBatchError, FrameError, ReleaseRefusedError
from phalanx.models import LoraConfig
from phalanx.objectives import mark_classes
from phalanx.optimizers import OptimizerConfig
from phalanx.split import BackTrainer, FrontPart, SplitConfig, build_back, microbatches_of, task_of
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.client_order import client_of
from phalanx.split.check import check_split
from phalanx.split.training.admitting_trainer import AdmittingTrainer

CLASSES, CUT, MICROBATCHES = 3, 2, 4
# the first one has two of four microbatches
ORDER, PEOPLE = ("west", "north", "south"), ("north", "south", "west")
ROBUST = {"rule": "median", "byzantine": 1, "momentum": 0.8, "patience": 5}
STEPS = 25


def rows(name, *seed, count=4, liar=""):
    """Texts with a class that a quarter of their tokens tell; a liar labels each with the next class."""
    generator = torch.Generator().manual_seed(hash((PEOPLE.index(name), *seed)))
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    ids = torch.randint(CLASSES, VOCAB, (count, SEQ), generator=generator)
    ids[:, : SEQ // 4] = classes[:, None]
    labels = (classes + 1) % CLASSES if name == liar else classes
    return ids, mark_classes(labels.tolist(), [SEQ] * count, SEQ)


class Enclave:
    """The back part of three clients in this thread, with admission or without."""

    def __init__(self, source, admission=None):
        self.front = FrontPart(source, CUT, wire="fp32")
        back = build_back(source, CUT, adapter=LoraConfig(rank=2), seed=0)
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, clip_norm=0.5)
        self.whole = BackTrainer(back, task_of("classification", CLASSES), optimizer, STEPS, 0)
        wanted = None if admission is None else ClientAdmissionConfig(**admission)
        self.trainer = self.whole if wanted is None else AdmittingTrainer(self.whole, ORDER, wanted)

    def train_turn(self, step, liar="", factor=1.0, of="west"):
        for number in range(MICROBATCHES):
            name = client_of(number, ORDER)
            ids, labels = rows(name, 1, step, number, liar=liar)
            self.trainer.learn_microbatch(self.front(ids) * (factor if name == of else 1.0), labels)
        return self.trainer.step()

    def measure_turn(self, name, liar=""):
        ids, labels = rows(name, 9, count=32, liar=liar)
        found = self.trainer.measure_microbatch(self.front(ids), labels)
        true = labels[labels >= 0].tolist()
        return found, sum(one == other for one, other in zip(found.answers, true, strict=True)) / len(true)

    def train(self, steps=STEPS, **lies):
        for step in range(steps):
            self.train_turn(step, **lies)
        return sum(self.measure_turn(name)[1] for name in ("north", "south")) / 2

    @property
    def excluded(self):
        return dict(self.trainer.client_standings.excluded_clients)


@pytest.fixture(scope="module")
def clean(source):
    """Accuracy on honest clients' texts without admission, and without lies."""
    return Enclave(source).train()


@pytest.fixture(scope="module")
def undefended(source):
    """The same beside a client that swaps labels."""
    return Enclave(source).train(liar="west")


@pytest.mark.quick_cases("median")
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "geometric_median"])
def test_a_client_that_swaps_labels_wins_without_admission_and_is_shut_out_by_a_robust_rule(
    source, clean, undefended, rule
):
    defended = Enclave(source, ROBUST | {"rule": rule})

    accuracy = defended.train(liar="west")

    assert clean > 0.7
    assert undefended < 0.55
    assert accuracy > clean - 0.1
    assert defended.excluded == {"west": "far"}


def test_honest_clients_are_not_shut_out_by_a_robust_rule_and_learn(source, clean):
    defended = Enclave(source, ROBUST)

    assert defended.train() > clean - 0.1
    assert defended.excluded == {}


def test_the_mean_of_admitted_clients_is_the_step_without_admission_within_rounding(source):
    plain, admitted = Enclave(source), Enclave(source, {"max_norm": 1e6})

    for step in range(4):
        assert admitted.train_turn(step) == pytest.approx(plain.train_turn(step), rel=1e-5)
        assert torch.allclose(
            torch.tensor(admitted.trainer.step_losses), torch.tensor(plain.trainer.step_losses), rtol=1e-4
        )
    for (name, one), (_, other) in zip(
        admitted.trainer.trained_weights(), plain.trainer.trained_weights(), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-5), name


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_activations_that_are_no_numbers_stop_every_step_without_admission_and_one_client_with_it(source, factor):
    with pytest.raises(FailedBatchError):
        Enclave(source).train_turn(0, factor=factor)
    defended = Enclave(source, {"patience": 2})

    norms = [defended.train_turn(step, factor=factor) for step in range(4)]

    assert all(map(math.isfinite, norms))
    assert [targets for _, targets in defended.trainer.step_losses] == [0, 4, 4, 0]
    assert defended.excluded == {"west": "not_finite"}


def test_a_gradient_over_the_norm_changes_no_bit(source):
    bound = {"max_norm": 1e-6}
    one = Enclave(source, bound)
    before = {name: value.clone() for name, value in one.trainer.trained_weights()}

    with pytest.raises(FailedBatchError, match="admission leaves no client's gradient"):
        one.train_turn(0)

    assert same(dict(one.trainer.trained_weights()), before)


def test_a_client_whose_held_out_labels_lie_does_not_count_while_its_loss_is_the_larger_one(source):
    defended = Enclave(source, {"held_out_factor": 1.3, "patience": 2})
    defended.train(steps=STEPS - 3)
    counted = []
    for step in range(STEPS - 3, STEPS):
        for name in ORDER:
            found, _ = defended.measure_turn(name, liar="south" if step < STEPS - 1 else "")
            defended.trainer.client_standings.note_measurement(name, found.loss, found.targets)
        defended.train_turn(step)
        counted.append(sorted(defended.trainer.counted_clients))

    assert counted == [["north", "west"]] * 3
    assert defended.excluded == {"south": "held_out_loss"}


def test_a_rule_that_too_few_clients_are_left_for_takes_no_step(source):
    defended = Enclave(source, ROBUST | {"rule": "krum", "byzantine": 1, "max_norm": 1e-6})

    with pytest.raises(FailedBatchError):
        defended.train_turn(0)


# --- over the line -----------------------------------------------------------------------------------------------


class NotFinite:
    """A client's front that sends what is no number."""

    def __init__(self, front):
        self._front = front

    def __call__(self, ids):
        return self._front(ids) * math.nan


def joined(house, session, told):
    """Have two honest clients and one that sends no numbers join; return the owner."""

    def aside(message):
        if isinstance(message, ask.ClientRefused):
            told.append(message)
            return True
        return False

    for name in ("north", "south"):
        session.join(name, texts_of(name))
    session.join("west", texts_of("west"), front=NotFinite(session.front))
    return session.lead(aside)


def texts_of(name):
    texts = Texts(0)
    texts.own_microbatches, texts.number = microbatches_of(name, MICROBATCHES, ORDER), ORDER.index(name)
    return texts


def house_of(source, directory, **given):
    given = {"admission": {"patience": 2}, **given}
    return RemoteHouse(source, directory, remote_clients=ORDER, clients=3, **given)


def test_the_owner_is_told_which_client_and_why_and_after_all_have_died_it_is_still_shut_out(source, tmp_path):
    told, again = [], []
    whole, cut = house_of(source, tmp_path / "whole"), house_of(source, tmp_path / "cut")
    with whole.open() as session:
        lead = joined(whole, session, told)
        wanted = [lead.train_step(step, step) for step in range(5)]
        weights = {name: value.clone() for name, value in session.server._trainer.trained_weights()}
    session = cut.open()
    lead = joined(cut, session, [])
    found = [lead.train_step(step, step) for step in range(3)]
    step, number, blob = lead.request_state()
    kept = bytes(blob)
    lead.settle_state(number)
    session.die()
    with cut.open() as session:
        lead = joined(cut, session, again)
        lead.restore_state(step, memoryview(kept))
        found += [lead.train_step(at, at) for at in (3, 4)]
        assert same(dict(session.server._trainer.trained_weights()), weights)

    facts = [(one.client, one.step, one.reason, one.figure, one.is_excluded) for one in told]
    assert facts == [("west", 0, "not_finite", None, False), ("west", 1, "not_finite", None, True)]
    assert again == []
    assert found == wanted
    assert [one.num_targets for one in wanted] == [2] * 5


def test_held_out_texts_of_which_the_loss_is_no_number_spoil_no_sum_and_are_told(source, tmp_path):
    told = []
    house = house_of(source, tmp_path / "with")
    with house.open() as session:
        lead = joined(house, session, told)
        found = lead.request_scores(0)
        lead.train_step(0, 0)

    assert math.isfinite(found.loss)
    # of two clients; those of the third one are left out
    assert found.targets == 2 * sum(len(ids) for ids, *_ in texts_of("north").held_out())
    facts = [(one.client, one.step, one.reason, one.is_excluded) for one in told]
    assert facts == [("west", 0, "not_finite", False), ("west", 0, "not_finite", False)]

    house = house_of(source, tmp_path / "without", admission=None)
    with house.open() as session:
        lead = joined(house, session, [])
        with pytest.raises(FrameError, match=r"loss nan.*\[split.admission\]"):
            lead.request_scores(0)


class LyingHeldOut(Texts):
    """Honest training texts; held-out ones have the label of the next class, and there are more of them."""

    def held_out(self):
        for at in range(7):
            ids, labels, extras = self.rows(2, at, rows=3)
            yield ids, torch.where(labels >= 0, (labels + 1) % CLASSES, labels), extras


@pytest.mark.quick_cases("admission0-True")
@pytest.mark.parametrize(
    ("admission", "is_out"), [({"max_norm": 1e6}, True), ({"max_norm": 1e6, "held_out_factor": 1.05}, False)]
)
def test_held_out_texts_of_a_client_that_is_out_move_no_figure_by_which_checkpoints_are_chosen(
    source, tmp_path, admission, is_out
):
    def figure(name, kind, wanted):
        house = house_of(source, tmp_path / name, admission=wanted)
        with house.open() as session:
            for name in ORDER:
                texts = texts_of(name)
                texts.__class__ = kind if name == "west" else Texts
                session.join(name, texts)
            lead = session.lead()
            for step in range(8):
                lead.train_step(step, step)
            if wanted is not None and is_out:
                session.server._enclave.admission.client_standings._excluded["west"] = "far"
            return lead.request_scores(8)

    honest, lied = figure("honest", Texts, None), figure("lied", LyingHeldOut, None)
    # where nothing looks, the figure is what the liar makes of it
    assert lied.loss / lied.targets > 1.05 * honest.loss / honest.targets
    assert lied.targets == honest.targets + 5 * 3

    defended = figure("defended", LyingHeldOut, admission)
    without = figure("without", Texts, admission)
    assert defended.targets == 2 * 2 * 3 == sum(true for true, _, _ in defended.classes)
    if is_out:
        assert (defended.loss, defended.classes) == (without.loss, without.classes)


def test_a_client_that_does_not_count_makes_no_release_of_one_client_more(source, tmp_path):
    house = house_of(source, tmp_path, release={"min_clients": 3, "clip_norm": 10.0})
    with house.open() as session:
        lead = joined(house, session, [])
        lead.train_step(0, 0)

        with pytest.raises(ReleaseRefusedError) as refusal:
            lead.prepare_release()

    assert refusal.value.reason == "too_few_clients"


@pytest.mark.parametrize(("clients", "byzantine", "stands"), [(3, 1, True), (4, 2, False), (5, 2, True)])
def test_a_rule_that_does_not_stand_so_many_liars_is_refused_before_anything_starts(source, clients, byzantine, stands):
    split = SplitConfig(
        cut=1, clients=clients, allow_insecure_sim=True, admission={"rule": "median", "byzantine": byzantine}
    )
    if stands:
        check_split(split, source, seq=SEQ, objective="classification")
    else:
        with pytest.raises(ConfigError, match=f"tolerates 1 of {clients} clients"):
            check_split(split, source, seq=SEQ, objective="classification")


def test_admission_and_middle_stages_in_other_hands_exclude_each_other():
    with pytest.raises(ValueError, match="needs the gradients of the whole back part"):
        SplitConfig(cut=1, allow_insecure_sim=True, workers_see_hidden_states=True, admission={})
