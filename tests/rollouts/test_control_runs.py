"""No worker is convicted before its texts were computed again as it computed them: with a cache, in its batches, with
its kernel, and with every choice of experts that rounding may have made.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_scene import Writers
from transformers import AutoModelForCausalLM

from phalanx.lab.attacks.rollouts import make_liar
from phalanx.models import FAMILIES, parse_hub_config
from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    RolloutCheck,
    RolloutPolicy,
    RolloutRequest,
    RolloutTolerance,
    RolloutWriter,
    SamplerConfig,
    generate_rollouts,
    judge_rollout,
    reread_rollouts,
)
from phalanx.rollouts.evidence import explain_any_evidence

sys.path.append(str(Path(__file__).parents[1] / "models"))

from planned_models import NO_WINDOWS, OTHERWISE, PLANNED
from tiny_models import ARCHITECTURES

ALL = RolloutCheck(rate=1.0)
LIMIT = 16
"""Tokens at which the rotations of longrope change here."""


def rotating(kind, **more):
    return {"max_position_embeddings": 64, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONG = rotating("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=LIMIT) | {
    "original_max_position_embeddings": LIMIT
}
ROTATIONS = {
    "linear": rotating("linear", factor=2.0),
    "dynamic": rotating("dynamic", factor=2.0),
    "yarn": rotating("yarn", factor=2.0, original_max_position_embeddings=LIMIT),
    "llama3": rotating(
        "llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=LIMIT
    ),
    "longrope": LONG,
}
TINY = (
    ARCHITECTURES
    | PLANNED
    | {f"{name}-other": PLANNED[name] | changes for name, changes in OTHERWISE.items()}
    | {f"{name}-no-window": PLANNED[name] | changes for name, changes in NO_WINDOWS.items()}
    | {f"llama-{kind}": ARCHITECTURES["llama"] | changes for kind, changes in ROTATIONS.items()}
    | {"phi3-longrope": PLANNED["phi3"] | LONG}
)
QUICK = {"bloom", "gemma2", "gemma3_text", "qwen3_moe", "llama-dynamic", "llama-longrope", "phi3-longrope"}


def policy_of(config, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(parse_hub_config(config, "test"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return RolloutPolicy.from_model(model)


def request_to(policy, lengths, *, new=12, step=1, **changes):
    """A request with a prompt of each of these lengths."""
    prompts = tuple(
        Prompt(number=n, ids=tuple((7 * n + 3 * k) % 50 + 6 for k in range(length))) for n, length in enumerate(lengths)
    )
    sampler = SamplerConfig(max_new_tokens=new, sketch_every=4, **changes)
    return RolloutRequest(
        step=step, policy=policy.full_digest, seed=3, sampler=sampler, prompts=prompts, samples=4, ends=(5,)
    )


def tokens(rollouts):
    return [(one.prompt, one.sample, one.ids) for one in rollouts]


def test_every_family_that_writes_texts_is_among_the_configs():
    writing = {name for name, family in FAMILIES.items() if family.facts.predicts == "next"}

    assert {config["model_type"] for config in TINY.values()} == writing


@pytest.mark.quick_cases("bloom", "qwen3_moe", "llama-longrope", "llama-dynamic", "gemma2")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(TINY)]
)
def test_an_honest_text_of_every_family_is_read_as_it_was_written(name):
    policy = policy_of(TINY[name])
    writer = PolicyModel.from_policy(policy)
    # below, across and beyond what windows and rotations change at; a cache that was used before changes nothing
    request = request_to(policy, [n for n in (5, 10, 18, 30) if n + 12 <= writer.context_length])
    honest = [generate_rollouts(writer, request, rows) for rows in (64, 4)]

    for texts in honest:
        reread = reread_rollouts(PolicyModel.from_policy(policy, "eager"), request, texts, 1e-3)
        assert [judge_rollout("w", request, *pair) for pair in zip(texts, reread, strict=True)] == [None] * len(texts)


class Company:
    """An honest company of three, and what it wrote."""

    def __init__(self, home, policy, request, writers=None, check=ALL):
        writers = writers or {f"writer-{n}": RolloutWriter(batch_rows=4 * n + 4) for n in range(3)}
        self.model = PolicyModel.from_policy(policy)
        self.alone = generate_rollouts(self.model, request)
        with (company := Writers(home, writers, check)) as self.owner:
            self.texts = self.owner.generate(policy, self.model, request)
        self.home, self.authority = home, company.pki / "authority.pem"

    def explain(self, verdict):
        return explain_any_evidence(self.home / verdict.evidence, self.authority, "run-1")


@pytest.mark.quick_cases("llama")
@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_texts_that_grow_beyond_the_limit_of_longrope_convict_nobody(name, tmp_path):
    policy = policy_of((PLANNED | ARCHITECTURES)[name] | LONG)

    found = Company(tmp_path, policy, request_to(policy, (10, 12, 15, 16, 17, 4)))

    assert (found.owner.verdicts, found.owner.active_workers) == ([], ("writer-0", "writer-1", "writer-2"))
    assert tokens(found.texts) == tokens(found.alone)


def test_padding_behind_a_short_text_does_not_turn_its_rotations():
    policy = policy_of(ARCHITECTURES["llama"] | LONG)
    model, request = PolicyModel.from_policy(policy), request_to(policy, (10, 10, 10))
    # the first text ends before the limit, and stands beside longer ones
    texts = [
        replace(one, ids=one.ids[:n]) for one, n in zip(generate_rollouts(model, request), (3, 12, 12), strict=False)
    ]
    texts[0] = replace(texts[0], logprobs=texts[0].logprobs[:3], sketches=texts[0].sketches[:1])

    reread = reread_rollouts(model, request, texts, 1e-3)

    assert max(one.logprob_gaps.max() for one in reread) < 1e-4


@pytest.mark.quick_cases("qwen3_moe-int8_weights", "*-wrong_temperature")
@pytest.mark.parametrize("kind", ["int8_weights", "wrong_temperature", "best_of_several"])
@pytest.mark.parametrize("name", ["phi3-longrope", "qwen3_moe", "bloom"])
def test_a_liar_is_convicted_in_these_families_too(kind, name, tmp_path):
    policy = policy_of(TINY[name])
    # of weights that are nearly right, a careful liar's tokens may all be honest
    writers = {"writer-0": RolloutWriter(), "writer-1": make_liar(kind, careful=kind != "int8_weights")}

    found = Company(tmp_path, policy, request_to(policy, (10, 12, 18, 9), new=24), writers)

    assert tokens(found.texts) == tokens(found.alone)
    (verdict,) = found.owner.verdicts
    assert verdict.party == "writer-1"
    assert found.explain(verdict)["conclusion"].startswith("holds: writer-1")


# --- routers


def router_of(model, layer):
    return model._model.model.layers[layer].mlp.gate


def seen_by_router(policy, prompt, layer, position):
    """What a router is given at a place, and its logits there."""
    model, seen = PolicyModel.from_policy(policy), []
    hook = router_of(model, layer).register_forward_hook(
        lambda _router, given, made: seen.append((given[0][position], made[0][position]))
    )
    model.read_whole_texts(torch.tensor([prompt]), 1)
    hook.remove()
    return seen[0]


def tied(policy, prompt, places):
    """The same policy with a router that is nearly undecided at each of these places.

    Args:
        policy: With experts.
        prompt: Token ids.
        places: Layer and position, in the order in which they are run.

    Returns:
        The policy; and of each place the layer, the expert that is nearly asked, and what changes its logit there by 1.
    """
    tensors, nudges = {name: one.clone() for name, one in policy.tensors.items()}, []
    tied_policy, gap = policy, 1.0
    for layer, position in places:
        for _ in range(8):
            tied_policy = RolloutPolicy(policy.config, {name: one.clone() for name, one in tensors.items()})
            hidden, logits = seen_by_router(tied_policy, prompt, layer, position)
            order, unit = logits.argsort(descending=True), hidden / hidden.square().sum()
            gap, expert = float(logits[order[1]] - logits[order[2]]), int(order[2])
            if 1e-7 < gap < 1e-6:
                break
            tensors[f"model.layers.{layer}.mlp.gate.weight"][expert] += (gap - 4e-7) * unit
        assert 1e-7 < gap < 1e-6
        nudges.append((layer, expert, unit))
    return tied_policy, nudges


class OtherClass(RolloutWriter):
    """An honest writer of another numeric class: sums for a router come out by 2e-6 otherwise, as on another chip."""

    def __init__(self, nudges):
        super().__init__()
        self._nudges = nudges

    def use_policy(self, policy):
        super().use_policy(policy)
        with torch.no_grad():
            for layer, expert, unit in self._nudges:
                router_of(self._model, layer).weight[expert] += 2e-6 * unit


# one in the prompt; one behind the other; and two in one token, which only together give the claims
TIES = {"prompt": [(1, 4)], "two tokens": [(0, 2), (2, 6)], "one token": [(0, 7), (2, 7)]}


@pytest.fixture(scope="module", params=[*(("qwen3_moe", ties) for ties in TIES), ("mixtral", "two tokens")])
def undecided(request):
    """A policy with near ties, what a writer of another class has of it, and a request that meets them."""
    name, ties = request.param
    plain = policy_of(PLANNED[name] | {"num_local_experts" if name == "mixtral" else "num_experts": 8})
    places = TIES[ties]
    asked = request_to(plain, (10, 9, 8))
    policy, nudges = tied(plain, asked.prompts[0].ids, places)
    return policy, nudges, asked.model_copy(update={"policy": policy.full_digest})


@pytest.mark.quick_cases("undecided0")
def test_a_writer_at_a_near_tie_of_a_router_is_not_convicted(undecided, tmp_path):
    policy, nudges, request = undecided
    first = request.model_copy(update={"prompts": request.prompts[:1]})
    other = OtherClass(nudges)
    other.use_policy(policy)
    far = reread_rollouts(PolicyModel.from_policy(policy), first, generate_rollouts(other._model, first), 1e-3)
    assert max(one.sketch_gaps.max() for one in far) > 1e-2, "the tie makes no difference"

    found = Company(tmp_path, policy, request, {"writer-0": OtherClass(nudges)})

    assert (found.owner.verdicts, found.owner.active_workers) == ([], ("writer-0",))
    assert found.owner.dismissals == []


@pytest.mark.quick_cases("undecided1")
def test_a_liar_is_convicted_beside_a_near_tie(undecided, tmp_path):
    policy, _, request = undecided

    found = Company(tmp_path, policy, request, {"writer-0": make_liar("int8_weights", careful=False)})

    (verdict,) = found.owner.verdicts
    assert tokens(found.texts) == tokens(found.alone)
    assert found.explain(verdict)["conclusion"].startswith("holds: writer-0")


def test_where_a_router_could_have_chosen_anything_a_liar_is_left_out_and_not_convicted(tmp_path):
    policy = policy_of(PLANNED["qwen3_moe"])
    check = RolloutCheck(rate=1.0, max_unanswered=0, tolerance=RolloutTolerance(router=1.0))

    found = Company(tmp_path, policy, request_to(policy, (10, 9, 8)), {"writer-0": make_liar("int8_weights")}, check)

    assert (found.owner.verdicts, found.owner.active_workers) == ([], ())
    assert tokens(found.texts) == tokens(found.alone)
    (dismissal,) = found.owner.dismissals
    assert dismissal.cause == "undecided"
    assert "routers have more near ties than can be tried" in dismissal.reason
