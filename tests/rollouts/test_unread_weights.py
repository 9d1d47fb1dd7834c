"""A lie in a text that was not drawn is not found; with a weight of 0 nothing of it is learned."""

from dataclasses import replace

import pytest
import torch
from rollout_scene import END, Writers

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
