"""The base of all attacks on rollouts: an honest writer, whose subclasses change single actions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from phalanx.errors import DataError
from phalanx.rollouts import (
    PolicyModel,
    Rollout,
    RolloutPolicy,
    RolloutRequest,
    RolloutWriter,
    generate_rollouts,
    pack_answer,
)
from phalanx.rollouts.prefill import read_texts
from phalanx.rollouts.sketch import sketch_states
from phalanx.rollouts.worker import Answer


class LyingWriter(RolloutWriter):
    """A writer with other texts, weights or words than the requested ones.

    A careful liar has the right weights as well: it reads its texts with them, and commits to the values of an honest
    worker. Only its tokens can then give it away.

    Args:
        careful: Whether commitments are made good in this way.
    """

    def __init__(self, *, careful: bool = True) -> None:
        super().__init__()
        self._careful = careful
        self._right: PolicyModel | None = None
        self._used: PolicyModel | None = None

    def use_policy(self, policy: RolloutPolicy) -> None:
        """Keep the right weights, and the weights that are used instead."""
        super().use_policy(policy)
        self._right = _build_or_update(self._right, policy)
        self._used = _build_or_update(self._used, self.replace_policy(policy))

    def write_answers(self, request: RolloutRequest) -> Sequence[Answer]:
        texts = self.make_texts(request)
        if self._careful:
            texts = self.with_right_evidence(request, texts)
        return [pack_answer(request, texts)]

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        """The weights that are used instead of these."""
        return policy

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """What is handed in."""
        return generate_rollouts(self.used_model, request)

    @property
    def used_model(self) -> PolicyModel:
        """The model that writes."""
        if self._used is None:
            raise DataError("no policy was sent")
        return self._used

    def with_right_evidence(self, request: RolloutRequest, texts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """The same tokens, with log-probabilities and sketches of the right weights."""
        if self._right is None:
            raise DataError("no policy was sent")
        return tuple(_with_commitment(self._right, request, text) for text in texts)


def _build_or_update(model: PolicyModel | None, policy: RolloutPolicy) -> PolicyModel:
    if model is None:
        return PolicyModel.from_policy(policy)
    model.copy_weights(policy)
    return model


def _with_commitment(model: PolicyModel, request: RolloutRequest, one: Rollout) -> Rollout:
    (read,) = read_texts(model, [one])
    scaled = (read.logits.double() / request.sampler.logit_divisor).log_softmax(dim=-1)
    logprobs = scaled.gather(1, torch.tensor(one.ids)[:, None])[:, 0].numpy().astype(np.float32)
    return replace(one, logprobs=logprobs, sketches=sketch_states(read.states[:: request.sampler.sketch_every]))
