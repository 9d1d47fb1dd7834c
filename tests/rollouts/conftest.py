"""What every test of rollouts shares: a policy, a request and honest texts."""

import pytest
from rollout_scene import END, policy_of_seed

from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    Rollout,
    RolloutPolicy,
    RolloutRequest,
    SamplerConfig,
    generate_rollouts,
)


@pytest.fixture(scope="session")
def policy() -> RolloutPolicy:
    return policy_of_seed(0)


@pytest.fixture(scope="session")
def model(policy: RolloutPolicy) -> PolicyModel:
    return PolicyModel.from_policy(policy)


@pytest.fixture(scope="session")
def request_of_step(policy: RolloutPolicy) -> RolloutRequest:
    """Three prompts of two lengths, four texts each."""
    return RolloutRequest(
        step=7,
        policy=policy.full_digest,
        seed=11,
        sampler=SamplerConfig(max_new_tokens=24, temperature=0.8, sketch_every=8),
        prompts=tuple(Prompt(number=n, ids=tuple(range(9 + n, 15 + 2 * n))) for n in range(3)),
        samples=4,
        ends=(END,),
    )


@pytest.fixture(scope="session")
def honest(model: PolicyModel, request_of_step: RolloutRequest) -> tuple[Rollout, ...]:
    return generate_rollouts(model, request_of_step)
