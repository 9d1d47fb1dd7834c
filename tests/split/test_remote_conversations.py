"""Clients with conversations of their own: the labels of each are made where its texts are, the loss in the enclave."""

import math

import pytest
import torch
from remote_house import CLIENTS, MICROBATCHES, RemoteHouse, Texts
from split_house import House
from split_scene import HIDDEN, LAYERS, SEQ, VOCAB, same

from phalanx.engine import NO_EXTRAS, StepInputs
from phalanx.errors import FrameError
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.objectives import IGNORE, causal_lm_loss
from phalanx.optimizers import learning_rate
from phalanx.split import ENCLAVE, FrontPart, build_back
from phalanx.split.roles.remote_lead import ScoreTotals

STEPS = 3


class Talks(Texts):
    """Conversations of one client: what the user says has no label."""

    def rows(self, *seed, rows=1):
        generator = torch.Generator().manual_seed(hash((self.number, *seed)))
        tokens = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        asked = torch.randint(1, SEQ - 1, (rows,), generator=generator)
        labels[torch.arange(SEQ) < asked[:, None]] = IGNORE
        return tokens[:, :-1].contiguous(), labels, NO_EXTRAS


class TalkHouse(RemoteHouse):
    """Two clients of other owners, with conversations."""

    def __init__(self, source, directory, **given):
        super().__init__(source, directory, **given)
        self.objective, self.classes = "causal_lm", 0


def batch(draw):
    """What all clients draw, in the order of the microbatches."""
    parts = {}
    for number in range(2):
        texts = Talks(number)
        parts.update(zip(texts.own_microbatches, texts.draw_rows(draw), strict=True))
    ids, labels, _ = zip(*(parts[at] for at in range(MICROBATCHES)), strict=True)
    return ids, labels


def remote_run(source, directory, **given):
    """Train and measure; return steps, scores and weights."""
    with TalkHouse(source, directory, **given).open() as session:
        for name in CLIENTS:
            session.join(name, Talks(CLIENTS.index(name)))
        lead = session.lead(num_classes=0)
        taken = [lead.train_step(step, step) for step in range(STEPS)]
        found = lead.request_scores(STEPS)
        weights = {name: value.clone() for name, value in session.server._trainer.trained_weights()}
        lead.compare_transcripts(session.house.identities[ENCLAVE].public)
        lead.end_session()
        session.wait()
        assert not session.failures
    return taken, found, weights


def test_remote_clients_with_conversations_have_the_bits_of_one_that_plays_them(source, tmp_path):
    taken, found, weights = remote_run(source, tmp_path / "remote")

    house = House(source, tmp_path / "local", clients=2)
    # dropout and names are those of the run, and the cut is the same
    with house.open() as session:
        local = [session.lead.train_step(step, StepInputs(*batch(step), 0)) for step in range(STEPS)]
        rows = [(name, *part) for n, name in enumerate(("client-0", "client-1")) for part in Talks(n).held_out()]
        scores = session.lead.measure_held_out(STEPS, iter([row[1:3] for row in rows]), [row[0] for row in rows])
        assert same(dict(session.server._trainer.trained_weights()), weights)

    assert [(one.loss, one.norm, one.num_targets) for one in taken] == [
        (one.loss, one.norm, one.num_targets) for one in local
    ]
    assert (found.loss, found.targets, found.classes) == (scores.loss, scores.targets, ())


def test_the_steps_are_those_of_one_process_on_the_union_within_rounding(tmp_path):
    """A written oracle: the whole model, all rows in one batch, the mean over assistant tokens, torch's own AdamW."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": 2, "vocab_size": VOCAB, "n_positions": SEQ}
    architecture = {"model_type": "gpt2", **sizes, **dropout}
    quiet = open_model(ModelConfig(from_scratch=True, architecture=architecture), tmp_path / "models", seed=11)
    taken, _, weights = remote_run(quiet, tmp_path)
    house = TalkHouse(quiet, tmp_path / "same")
    config = house.config("x")
    front, back = FrontPart(quiet, config.split.cut), build_back(quiet, config.split.cut, adapter=LoraConfig(rank=2))
    trained = back.trainable_parameters()
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    back.train()
    for step in range(STEPS):
        ids, labels = (torch.cat(column) for column in batch(step))
        loss, targets = causal_lm_loss(back(front(ids)), labels)
        optimizer.zero_grad()
        (loss / targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), config.optimizer.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(config.optimizer, step, config.steps)
        optimizer.step()

        assert taken[step].num_targets == targets == int((labels != IGNORE).sum())
        assert taken[step].loss == pytest.approx(float(loss.detach()) / targets, rel=1e-5)
        assert taken[step].norm == pytest.approx(float(norm), rel=1e-4)
    for name, value in trained.items():
        assert torch.allclose(value, weights[name], rtol=0, atol=2e-5), name


def test_activations_in_half_precision_train_close_by_and_are_half_the_bytes(source, tmp_path):
    whole, _, _ = remote_run(source, tmp_path / "fp32")
    half, _, _ = remote_run(source, tmp_path / "bf16", wire="bf16")

    assert [one.loss for one in half] == pytest.approx([one.loss for one in whole], rel=2e-2)
    assert [one.loss for one in half] != [one.loss for one in whole]


@pytest.mark.parametrize("numbers", [[1.0, 0.0], [-1.0, 3.0], [math.nan, 3.0], [1.0, 2.5]])
def test_sums_of_a_language_model_that_cannot_be_are_refused(numbers):
    with pytest.raises(FrameError):
        ScoreTotals(numbers)
    assert ScoreTotals([3.0, 2.0]).targets == 2
