"""Preferences in a split: pairs of answers stay with their clients, and the steps are those of one process."""

import itertools
import math

import pytest
import torch
from remote_house import CLIENTS, MICROBATCHES, RemoteHouse, Texts
from split_house import House
from split_scene import HIDDEN, LAYERS, SEQ, VOCAB, make_scene, same

from phalanx.engine import StepInputs
from phalanx.errors import DataError, FrameError
from phalanx.models import LoraConfig, ModelConfig, StageSpec, build_stage, open_model
from phalanx.objectives import IGNORE, objective_of
from phalanx.objectives.dpo import CpoSettings, DpoSettings, IpoSettings, OrpoSettings, SimpoSettings
from phalanx.objectives.pairs import REFERENCE, row_log_probs
from phalanx.optimizers import learning_rate
from phalanx.split import ENCLAVE, FrontPart, build_back, task_of
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.channel.turn_messages import ClientRefused
from phalanx.split.roles.remote_lead import ScoreTotals
from phalanx.testing import SplitSimulator

STEPS, ROWS = 3, 4
DPO = DpoSettings(beta=0.5)


def pairs_of(*seed, rows=ROWS):
    """Rows of pairs: the prompt, which both rows share, has no label; and a reference of made-up numbers."""
    generator = torch.Generator().manual_seed(hash(("pairs", *seed)))
    tokens = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=generator)
    tokens[1::2, :3] = tokens[0::2, :3]
    labels = tokens[:, 1:].clone()
    labels[:, :2] = IGNORE
    reference = -4.0 * torch.rand(rows, generator=generator) - 20.0
    return tokens[:, :-1].contiguous(), labels, {REFERENCE: reference}


def batch_of(step, objective=DPO):
    """The microbatches of a step, and the extra rows of each that an objective reads."""
    parts = [pairs_of(step, number) for number in range(MICROBATCHES)]
    wanted = objective_of(objective).extras
    extras = [{name: rows for name, rows in more.items() if name in wanted} for *_, more in parts]
    return [part[:2] for part in parts], extras


def simulator_of(source, mode="sealed", objective=DPO, **given):
    return SplitSimulator(make_scene(source, mode, rows=ROWS, **given), task_of(objective, 0))


@pytest.mark.parametrize(
    "objective",
    [DPO, IpoSettings(), OrpoSettings(), SimpoSettings(), CpoSettings()],
    ids=lambda objective: objective.kind,
)
def test_sealed_and_plaintext_splits_learn_preferences_with_the_same_bits(source, objective):
    sealed, plain = (simulator_of(source, mode, objective) for mode in ("sealed", "plaintext"))

    steps = [sealed.step(*batch_of(step, objective)) for step in range(2)]

    others = [plain.step(*batch_of(step, objective)) for step in range(2)]
    assert [(one.loss, one.norm) for one in steps] == [(one.loss, one.norm) for one in others]
    assert [one.num_targets for one in steps] == [MICROBATCHES * ROWS // 2] * 2
    assert same(sealed.copy_adapters(), plain.copy_adapters())
    (held_out, extras) = batch_of(99, objective)
    scores = sealed.measure_held_out(*held_out[0], extras=extras[0])
    assert scores == plain.measure_held_out(*held_out[0], extras=extras[0])
    assert (scores.targets, scores.answers, len(scores.pair_sums)) == (ROWS // 2, (), 2)


@pytest.fixture
def quiet(tmp_path):
    """A model without dropout."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": 2, "vocab_size": VOCAB, "n_positions": SEQ}
    architecture = {"model_type": "gpt2", **sizes, **dropout}
    return open_model(ModelConfig(from_scratch=True, architecture=architecture), tmp_path / "models", seed=11)


@torch.no_grad()
def with_reference(source, rows):
    """The same rows with what the whole model says of them before training, as each client computes it."""
    ids, labels, _ = rows
    spec = StageSpec(0, 1, 0, LAYERS)
    whole = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0).eval()
    return ids, labels, {REFERENCE: row_log_probs("reference", whole(ids), labels).total}


def test_the_steps_are_those_of_dpo_in_one_process_on_the_union_within_rounding(quiet):
    """A written oracle: the whole model, all pairs in one batch, equation 7 of Rafailov et al., torch's own AdamW."""
    scene = make_scene(quiet, rows=ROWS)
    simulator = SplitSimulator(scene, task_of(DPO, 0))
    front, back = FrontPart(quiet, scene.split.cut), build_back(quiet, scene.split.cut, adapter=LoraConfig(rank=2))
    trained, config = back.trainable_parameters(), scene.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    back.train()
    for step in range(STEPS):
        parts = [with_reference(quiet, pairs_of(step, number)) for number in range(MICROBATCHES)]
        taken = simulator.step([part[:2] for part in parts], [extras for *_, extras in parts])
        ids, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        reference = torch.cat([part[2][REFERENCE] for part in parts])

        log_probs = torch.log_softmax(back(front(ids)).float(), dim=-1)
        of_labels = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        ratios = (of_labels * (labels != IGNORE)).sum(1) - reference
        losses = -torch.nn.functional.logsigmoid(DPO.beta * (ratios[0::2] - ratios[1::2]))
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), config.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(config, step, scene.total_steps)
        optimizer.step()

        assert taken.num_targets == len(losses)
        assert taken.loss == pytest.approx(float(losses.mean().detach()), rel=1e-5)
        assert taken.norm == pytest.approx(float(norm), rel=1e-4)
        if step == 0:
            assert taken.loss == pytest.approx(0.6931472, abs=1e-6)
    weights = simulator.copy_adapters()
    for name, value in trained.items():
        assert torch.allclose(value, weights[name], rtol=0, atol=2e-5), name


def test_held_out_sums_are_those_of_the_pairs_by_hand_and_equal_answers_count_half(quiet):
    scene = make_scene(quiet, rows=ROWS)
    simulator = SplitSimulator(scene, task_of(DPO, 0))
    ids, labels, _ = pairs_of("sums", rows=6)
    # far from zero together, whatever the rows are
    extras = {REFERENCE: torch.tensor([-20.0, -40.0, -60.0, -20.0, -20.0, -20.0])}
    for rows in (ids, labels, extras[REFERENCE]):
        # the last pair has one answer twice
        rows[5] = rows[4]
    back = build_back(quiet, scene.split.cut, adapter=LoraConfig(rank=2)).eval()
    with torch.no_grad():
        log_probs = torch.log_softmax(back(FrontPart(quiet, scene.split.cut)(ids)).float(), dim=-1)
    of_labels = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    worth = DPO.beta * ((of_labels * (labels != IGNORE)).sum(1) - extras[REFERENCE])
    gaps = worth[0::2] - worth[1::2]

    ordered, margin = simulator.measure_held_out(ids, labels, extras=extras).pair_sums

    assert gaps[2] == 0
    assert ordered == 2 * int((gaps > 0).sum()) + 1
    assert margin == pytest.approx(float(gaps.sum()), rel=1e-4)
    assert margin > 1


@pytest.mark.parametrize("ordered", [-1.0, 1.5, float("nan")])
def test_a_count_of_pairs_that_is_none_is_refused_by_its_client(source, ordered):
    client = simulator_of(source, "plaintext").clients["client-0"]
    kind = client._kinds.result_kind("held_out", 5)
    frame = client.link.pack_tensor(kind, 0, 0, torch.tensor([0.0, 1.0, 2.0, ordered, 0.5], dtype=torch.float64))

    with pytest.raises(FrameError, match="which are no counts"):
        client.read_scores(frame, 0, 0, ROWS)


class Pairs(Texts):
    """Pairs of one client, with their reference."""

    def rows(self, *seed, rows=ROWS):
        return pairs_of(self.number, *seed, rows=rows + rows % 2)


class PairHouse(RemoteHouse):
    """Two clients of other owners, with pairs."""

    def __init__(self, source, directory, **given):
        super().__init__(source, directory, **given)
        self.objective, self.classes, self.rows = DPO, 0, ROWS


def inputs_of(draw):
    """What all clients draw, in the order of the microbatches."""
    parts = {}
    for number in range(2):
        pairs = Pairs(number)
        parts.update(zip(pairs.own_microbatches, pairs.draw_rows(draw), strict=True))
    ids, labels, extras = zip(*(parts[at] for at in range(MICROBATCHES)), strict=True)
    return StepInputs(ids, labels, 0, extras)


def test_remote_clients_with_pairs_have_the_bits_of_one_that_plays_them(source, tmp_path):
    with PairHouse(source, tmp_path / "remote").open() as session:
        for name in CLIENTS:
            session.join(name, Pairs(CLIENTS.index(name)))
        lead = session.lead(num_classes=0, num_pair_sums=2)
        taken = [lead.train_step(step, step) for step in range(STEPS)]
        found = lead.request_scores(STEPS)
        weights = {name: value.clone() for name, value in session.server._trainer.trained_weights()}
        lead.compare_transcripts(session.house.identities[ENCLAVE].public)
        lead.end_session()
        session.wait()
        assert not session.failures

    house = House(source, tmp_path / "local", clients=2)
    house.objective, house.rows = DPO, ROWS
    with house.open() as session:
        local = [session.lead.train_step(step, inputs_of(step)) for step in range(STEPS)]
        rows = [(name, *part) for n, name in enumerate(("client-0", "client-1")) for part in Pairs(n).held_out()]
        senders, parts, extras = [row[0] for row in rows], [row[1:3] for row in rows], [row[3] for row in rows]
        scores = session.lead.measure_held_out(STEPS, iter(parts), senders, extras)
        assert same(dict(session.server._trainer.trained_weights()), weights)

    assert [(one.loss, one.norm, one.num_targets) for one in taken] == [
        (one.loss, one.norm, one.num_targets) for one in local
    ]
    assert (found.loss, found.targets, found.pair_sums) == (scores.loss, scores.targets, scores.pair_sums)
    assert (found.targets, found.classes) == (8, ())


class NoNumbers(Pairs):
    """A liar: the references of its held-out pairs are infinite, so that a difference is, and sums have none."""

    def held_out(self):
        for infinite in (-math.inf, math.inf):
            ids, labels, extras = self.rows(2)
            yield ids, labels, {REFERENCE: torch.where(torch.arange(ROWS) == 0, infinite, extras[REFERENCE])}


class OneInfinity(NoNumbers):
    """The same with a loss of its pairs that is a number: the better answer is infinitely better."""

    def held_out(self):
        return itertools.islice(super().held_out(), 1)


@pytest.mark.parametrize("liar", [NoNumbers, OneInfinity])
@pytest.mark.parametrize("admits", [False, True])
def test_a_client_whose_pairs_differ_by_infinity_ends_no_enclave_and_spoils_no_sum(source, tmp_path, liar, admits):
    given = {"admission": ClientAdmissionConfig(max_norm=1e6)} if admits else {}
    with PairHouse(source, tmp_path, **given).open() as session:
        session.join("north", Pairs(0))
        session.join("south", liar(1))
        lead = session.lead(lambda message: isinstance(message, ClientRefused), num_classes=0, num_pair_sums=2)
        if admits:
            scores = lead.request_scores(0)
            assert scores.targets == 4
            assert all(map(math.isfinite, (scores.loss, *scores.pair_sums)))
        else:
            with pytest.raises(FrameError, match="sums over pairs are"):
                lead.request_scores(0)

        assert lead.train_step(0, 0).num_targets == MICROBATCHES * ROWS // 2
        assert not session.failures


def test_a_host_reads_labels_and_references_of_a_plaintext_split_and_none_of_a_sealed_one(source):
    """The attack looks for the bytes of what a client has in everything that crosses, and wins without the seal."""
    (rows, extras) = batch_of(0)
    wanted = [
        numbers.contiguous().numpy().tobytes()
        for (_, labels), more in zip(rows, extras, strict=True)
        for numbers in (labels, more[REFERENCE])
    ]
    seen = {}
    for mode in ("plaintext", "sealed"):
        frames = []

        def copy(crossing, frames=frames):
            frames.append(crossing.frame)
            return (crossing.frame,)

        simulator = simulator_of(source, mode, chunk_bytes=1 << 16)
        simulator.host = copy
        simulator.step(rows, extras)
        seen[mode] = sum(any(numbers in frame for frame in frames) for numbers in wanted)

    assert seen == {"plaintext": len(wanted), "sealed": 0}


def test_a_reference_of_another_microbatch_is_refused_and_changes_nothing(source):
    """A host that gives one pair the reference of another would turn a preference round."""
    honest, attacked = simulator_of(source), simulator_of(source)
    held_back = {}

    def exchange(crossing):
        if crossing.name != f"extra.{REFERENCE}" or crossing.attempt:
            return (crossing.frame,)
        other = held_back.get(crossing.client, crossing.frame)
        held_back[crossing.client] = crossing.frame
        return (other,)

    attacked.host = exchange

    for step in range(2):
        assert attacked.step(*batch_of(step)).loss == honest.step(*batch_of(step)).loss
    assert same(attacked.copy_adapters(), honest.copy_adapters())
    assert len(held_back) == 2


def test_pairs_without_their_reference_are_refused_where_they_are(source):
    (rows, _) = batch_of(0)

    with pytest.raises(DataError, match=r"the batch has \[\], the objective reads \['reference'\]"):
        simulator_of(source).step(rows)
    with pytest.raises(DataError, match="the objective reads"):
        simulator_of(source).measure_held_out(*rows[0])
    more = {REFERENCE: torch.zeros(ROWS), "unknown": torch.zeros(ROWS)}
    with pytest.raises(DataError, match=r"the batch has \['reference', 'unknown'\]"):
        simulator_of(source).measure_held_out(*rows[0], extras=more)


@pytest.mark.parametrize(
    "sums", [[4.0, float("inf")], [4.0, float("nan")], [5.0, 1.0], [-1.0, 1.0], [1.5, 1.0], [float("nan"), 1.0]]
)
def test_sums_over_pairs_that_cannot_be_are_refused(sums):
    with pytest.raises(FrameError):
        ScoreTotals([1.0, 2.0, *sums], num_pair_sums=2)
    assert ScoreTotals([1.0, 2.0, 4.0, -0.5], num_pair_sums=2).pair_sums == (4.0, -0.5)
