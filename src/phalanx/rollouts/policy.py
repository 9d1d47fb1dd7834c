"""The weights that rollouts are drawn from: named by one digest, built without code of others, run with a KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache

from phalanx.config import canonical_json
from phalanx.errors import ModelError
from phalanx.models import parse_hub_config, weights_digest
from phalanx.models.families import TRANSFORMERS_REFUSALS, hub_config_dict
from phalanx.models.quiet import quiet_transformers
from phalanx.security.crypto import digest_hex


@dataclass(frozen=True)
class RolloutPolicy:
    """The weights of one step, as data.

    Attributes:
        config: Keys of the hub's config.json.
        tensors: Parameters by the hub's names; a tied one comes once.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Take config and parameters of a causal model of transformers; the tensors are shared, not copied."""
        return cls(hub_config_dict(model.config), {name: one.detach() for name, one in model.named_parameters()})

    @cached_property
    def digest(self) -> str:
        """Names config and every bit of every weight: what a request asks for and an answer is given under."""
        return digest_hex(canonical_json([dict(self.config), weights_digest(self.tensors.items())]))


@dataclass(frozen=True)
class ReadTexts:
    """What a model computed at some positions of a batch.

    Attributes:
        logits: ``[rows, positions, vocab]``.
        states: What the output layer was given, ``[rows, positions, width]``.
    """

    logits: Tensor
    states: Tensor


class PolicyModel:
    """A causal model of transformers that rollouts are drawn from or checked with.

    Args:
        model: In this process; it is put into evaluation mode for each call and back after it.

    Raises:
        ModelError: It has no output layer of its own.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__}: has no output layer; rollouts are drawn from causal models")
        self._states: list[Tensor] = []
        head.register_forward_pre_hook(lambda _module, given: self._states.append(given[0].detach()))

    @classmethod
    def build(cls, policy: RolloutPolicy, attention: str = "sdpa", device: str = "cpu") -> Self:
        """Build a model from data: its family must be one that Phalanx knows, and no code comes with it.

        Raises:
            ModelError: The config or a tensor does not fit.
        """
        config = parse_hub_config(policy.config, "policy")
        dtypes = {one.dtype for one in policy.tensors.values() if one.is_floating_point()}
        if len(dtypes) != 1:
            raise ModelError(f"policy: found weights of {len(dtypes)} types of numbers, expected one")
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            try:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtypes.pop(), attn_implementation=attention, trust_remote_code=False
                )
            except TRANSFORMERS_REFUSALS as exc:
                raise ModelError(f"policy: {config.model_type} cannot be built: {exc}") from exc
        made = cls(model.to(device).eval())
        made.take(policy)
        return made

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def device(self) -> str:
        """Where its weights are."""
        return str(self._model.device)

    @property
    def window(self) -> int:
        """Tokens that a prompt and its continuation may have together."""
        return int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 20)

    def take(self, policy: RolloutPolicy) -> None:
        """Copy other weights of the same model in.

        Raises:
            ModelError: Names or shapes differ.
        """
        own = dict(self._model.named_parameters())
        if own.keys() != policy.tensors.keys():
            odd = sorted(own.keys() ^ policy.tensors.keys())
            raise ModelError(f"policy: {len(odd)} weights are missing or unknown, such as {odd[0]!r}")
        with torch.no_grad():
            for name, tensor in policy.tensors.items():
                if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                    raise ModelError(
                        f"policy: {name} is {tensor.dtype}{list(tensor.shape)}, expected "
                        f"{own[name].dtype}{list(own[name].shape)}"
                    )
                own[name].copy_(tensor)

    def begin(self, ids: Tensor) -> tuple[ReadTexts, Cache]:
        """Read prompts of one length, ``[rows, tokens]``; what follows their last token, and the cache."""
        return self._read(ids, None, 1)

    def extend(self, tokens: Tensor, cache: Cache) -> ReadTexts:
        """Read one further token a row, ``[rows]``."""
        return self._read(tokens[:, None], cache, 1)[0]

    def read(self, ids: Tensor, positions: int) -> ReadTexts:
        """Read whole texts at once, ``[rows, tokens]``; what follows each of their last tokens."""
        return self._read(ids, None, positions)[0]

    def _read(self, ids: Tensor, cache: Cache | None, positions: int) -> tuple[ReadTexts, Cache]:
        training = self._model.training
        if training:
            self._model.eval()
        self._states.clear()
        try:
            with torch.no_grad():
                found = self._model(
                    input_ids=ids.to(self._model.device),
                    past_key_values=cache,
                    use_cache=cache is not None or positions == 1,
                    logits_to_keep=positions,
                )
            (states,) = self._states
        finally:
            if training:
                self._model.train()
            self._states.clear()
        return ReadTexts(found.logits[:, -positions:], states[:, -positions:]), found.past_key_values
