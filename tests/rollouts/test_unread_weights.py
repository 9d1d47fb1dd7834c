"""A lie in a text that was not drawn is not found; with a weight of 0 nothing of it is learned."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_scene import END, Writers

from phalanx.objectives import OBJECTIVES, policy_gradient
from phalanx.objectives.policy_gradient import ADVANTAGES, DrawnTexts, DrGrpoSettings, GrpoSettings, RlooSettings
from phalanx.rollouts import (
    CheckedShare,
    PolicyModel,
    Prompt,
    RolloutCheck,
    RolloutRequest,
    RolloutWriter,
    SamplerConfig,
    generate_rollouts,
    pack_answer,
)
from phalanx.rollouts.rollout import unpack_answer
from phalanx.train.batches.rollouts import LearnedRow, batch_of

SETTINGS = [GrpoSettings(group=6), DrGrpoSettings(kind="dr_grpo", group=6), RlooSettings(kind="rloo", group=6)]


class OneForgedText(RolloutWriter):
    """An honest worker but for the first text of each answer, which has the tokens that earn most."""

    def write_answers(self, request):
        ((answer, payload),) = super().write_answers(request)
        first, *rest = unpack_answer(request, answer, payload)
        forged = tuple(token for token in range(20, 20 + len(first.ids) - 1)) + first.ids[-1:]
        return [pack_answer(request, (replace(first, ids=forged), *rest), answer.written_in)]


def reward_of(rollout):
    """The share of low tokens: a quarter of an honest text, nearly all of the forged one."""
    return sum(token < 60 for token in rollout.ids) / len(rollout.ids)


@pytest.fixture(scope="module")
def scene(policy):
    request = RolloutRequest(
        step=0,
        policy=policy.full_digest,
        seed=3,
        sampler=SamplerConfig(max_new_tokens=24, sketch_every=8),
        prompts=tuple(Prompt(number=n, ids=tuple((7 * n + 3 * k) % 250 + 6 for k in range(6))) for n in range(2)),
        samples=6,
        ends=(END,),
    )
    model = PolicyModel.from_policy(policy)
    return policy, model, request, generate_rollouts(model, request)


@pytest.fixture
def even_places_are_lucky(monkeypatch):
    """No text at an even place of an answer is drawn."""
    draw = lambda self, worker, signed, texts: tuple(range(1, texts, 2))  # noqa: E731
    monkeypatch.setattr(CheckedShare, "draw_texts", draw)


def written(scene, home, weight):
    policy, model, request, _ = scene
    check = RolloutCheck(rate=0.5, unread_weight=weight)
    with Writers(home, {"writer-0": OneForgedText()}, check) as owner:
        texts = owner.generate(policy, model, request)
    assert owner.verdicts == []
    return texts


def advantages_of(texts, settings):
    """What a step learns from each text."""
    longest = max(len(one.ids) for one in texts)
    mask = torch.stack([torch.arange(longest) < len(one.ids) for one in texts])
    nothing = torch.zeros(mask.shape)
    drawn = DrawnTexts(
        rewards=torch.tensor([reward_of(one) for one in texts], dtype=torch.float64),
        mask=mask,
        old=nothing,
        reference=nothing,
        kl=0.0,
        weights=torch.tensor([one.weight for one in texts], dtype=torch.float64),
    )
    return settings.extra_columns(drawn)[ADVANTAGES][:, 0]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one.kind)
def test_an_unread_lie_is_learned_with_all_its_weight_and_with_none_nothing_of_it(
    scene, tmp_path, even_places_are_lucky, settings
):
    honest = scene[3]
    found = {weight: written(scene, tmp_path / str(weight), weight) for weight in (1.0, 0.25, 0.0)}

    learned = {weight: advantages_of(texts, settings) for weight, texts in found.items()}

    # the lie is there, and was not read
    assert all(texts[0].ids != honest[0].ids for texts in found.values())
    assert [one.weight for one in found[0.25]] == [0.25, 1.0] * 6
    truth = {
        weight: advantages_of(
            [replace(one, weight=text.weight) for one, text in zip(honest, texts, strict=True)], settings
        )
        for weight, texts in found.items()
    }
    # where every text counts alike the liar moves its own text and all others of its prompt
    assert learned[1.0][0] > truth[1.0][0] + 0.1
    assert not torch.isclose(learned[1.0][1:6], truth[1.0][1:6]).any()
    assert 0 < learned[0.25][0] < learned[1.0][0]
    # with a weight of 0 it moves nothing
    assert learned[0.0][0] == 0
    assert torch.equal(learned[0.0], truth[0.0])
    assert learned[0.0].abs().max() > 0


class ForgedClaim(RolloutWriter):
    """An honest worker but for one number of the first text of each answer: how likely its tokens were to it."""

    def __init__(self, claim):
        super().__init__()
        self.claim = claim

    def write_answers(self, request):
        ((answer, payload),) = super().write_answers(request)
        first, *rest = unpack_answer(request, answer, payload)
        forged = replace(first, logprobs=np.full(len(first.ids), self.claim, np.float32))
        return [pack_answer(request, (forged, *rest), answer.written_in)]


def gradients_of(scene, texts, settings):
    """The norm of each text's part in the gradient of one step."""
    model, longest = scene[1], max(len(one.ids) for one in texts)
    rows = [LearnedRow(one.prompt_ids, one.ids, {}) for one in texts]
    seq = len(texts[0].prompt_ids) + longest - 1
    batch = batch_of(rows, range(len(rows)), seq, 0)
    logits = model.read_whole_texts(batch.input_ids, seq).logits.clone().requires_grad_()
    old = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(one.logprobs.copy()) for one in texts], batch_first=True)
    drawn = DrawnTexts(
        # the first text earns least
        rewards=torch.arange(len(texts), dtype=torch.float64) % 6,
        mask=torch.stack([torch.arange(longest) < len(one.ids) for one in texts]),
        old=old,
        reference=old,
        kl=0.0,
        weights=torch.tensor([one.weight for one in texts], dtype=torch.float64),
    )
    columns = settings.extra_columns(drawn)
    begin = len(texts[0].prompt_ids) - 1
    extras = {name: torch.nn.functional.pad(column.float(), (begin, 0)) for name, column in columns.items()}
    loss, _ = OBJECTIVES[settings.kind].with_settings(settings)(logits, batch.labels, extras)
    loss.backward()
    return loss.detach(), torch.linalg.vector_norm(logits.grad, dim=(1, 2))


def forged_texts(scene, honest, weight):
    texts = [replace(one, weight=weight if n % 2 == 0 else 1.0) for n, one in enumerate(honest)]
    return [replace(texts[0], logprobs=np.full(len(texts[0].ids), -100.0, np.float32)), *texts[1:]]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one.kind)
@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_a_text_that_claims_to_have_been_unlikely_is_no_more_than_one_text_of_ten(
    scene, tmp_path, monkeypatch, even_places_are_lucky, settings, weight
):
    """A ratio to a made-up probability would be the whole gradient, or infinite: also of a text without weight."""
    policy, model, request, honest = scene

    def learn(claim):
        check = RolloutCheck(rate=0.5, unread_weight=weight)
        with Writers(tmp_path / f"{claim}", {"writer-0": ForgedClaim(claim)}, check) as owner:
            texts = owner.generate(policy, model, request)
        assert owner.verdicts == []
        return gradients_of(scene, texts, settings)

    true = gradients_of(
        scene, [replace(one, weight=weight if n % 2 == 0 else 1.0) for n, one in enumerate(honest)], settings
    )
    for claim in (-60.0, -5.0):
        loss, parts = learn(claim)
        assert torch.isfinite(loss)
        assert parts[0] <= 10 * true[1][0] + 1e-6
        assert torch.allclose(parts[1:], true[1][1:], rtol=1e-4)

    # without the bound it wins
    monkeypatch.setattr(policy_gradient, "MAX_RATIO", math.inf)
    loss, parts = gradients_of(scene, forged_texts(scene, honest, weight), settings)
    assert not torch.isfinite(parts[0]) or parts[0] > 1e6 * true[1][1:].max()


@pytest.mark.parametrize("claim", [-1e4, -101.0, 0.01, 50.0])
def test_a_log_probability_that_no_draw_gives_convicts_its_writer(scene, tmp_path, even_places_are_lucky, claim):
    policy, model, request, honest = scene
    with Writers(tmp_path, {"writer-0": ForgedClaim(claim)}, RolloutCheck(rate=0.5)) as owner:
        texts = owner.generate(policy, model, request)

    assert [(one.party, one.offence) for one in owner.verdicts] == [("writer-0", "form")]
    assert "has a log-probability that no draw gives" in owner.verdicts[0].reason
    assert [one.ids for one in texts] == [one.ids for one in honest]
