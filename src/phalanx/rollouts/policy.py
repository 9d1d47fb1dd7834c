"""The weights that rollouts are drawn from: named by one digest, built without code of others, run with a KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache

from phalanx.config import canonical_json
from phalanx.errors import ModelError
from phalanx.models import parse_hub_config, weights_digest
from phalanx.models.families import TRANSFORMERS_REFUSALS, family_of, hub_config_dict
from phalanx.models.planned import ROUTER
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
    def from_model(cls, model: Any) -> Self:
        """Take config and parameters of a causal model of transformers; the tensors are shared, not copied."""
        return cls(
            hub_config_dict(model.config), {name: parameter.detach() for name, parameter in model.named_parameters()}
        )

    @cached_property
    def full_digest(self) -> str:
        """Return the digest of config and every bit of every weight; requests and answers name it."""
        return policy_digest(self.config, self.digest_of_weights)

    @cached_property
    def digest_of_weights(self) -> str:
        """Digest of the weights alone."""
        return weights_digest(self.tensors.items())


def policy_digest(config: Mapping[str, Any], weights: str) -> str:
    """Name a policy by its config and the digest of its weights; a config is checked without the weights themselves."""
    return digest_hex(canonical_json([dict(config), weights]))


def _check_weights(parameters: Mapping[str, Tensor], policy: RolloutPolicy) -> None:
    """Refuse a policy with other weights than these, by name, shape or type."""
    if parameters.keys() != policy.tensors.keys():
        odd = sorted(parameters.keys() ^ policy.tensors.keys())
        raise ModelError(f"policy: {len(odd)} weights are missing or unknown, such as {odd[0]!r}")
    for name, tensor in policy.tensors.items():
        if parameters[name].shape != tensor.shape or parameters[name].dtype != tensor.dtype:
            raise ModelError(
                f"policy: {name} is {tensor.dtype}{list(tensor.shape)}, expected "
                f"{parameters[name].dtype}{list(parameters[name].shape)}"
            )


@dataclass(frozen=True)
class ReadTexts:
    """A model's outputs at some positions of a batch.

    Attributes:
        logits: ``[rows, positions, vocab]``.
        states: Inputs of the output layer, ``[rows, positions, width]``.
    """

    logits: Tensor
    states: Tensor


class PolicyModel:
    """A causal model of transformers that rollouts are drawn from or checked with.

    Args:
        model: Model in this process; it is put into evaluation mode for each call and back after it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__}: has no output layer; rollouts are drawn from causal models")
        self._states: list[Tensor] = []
        head.register_forward_pre_hook(lambda _module, given: self._states.append(given[0].detach()))

    @classmethod
    def from_policy(cls, policy: RolloutPolicy, attention: str = "sdpa", device: str = "cpu") -> Self:
        """Build a model from data: its family must be one that Phalanx knows, and no code comes with it."""
        config = parse_hub_config(policy.config, "policy")
        dtypes = {tensor.dtype for tensor in policy.tensors.values() if tensor.is_floating_point()}
        if len(dtypes) != 1:
            raise ModelError(f"policy: found weights of {len(dtypes)} types of numbers, expected one")
        kernel = family_of(config.model_type, "policy").choose_kernel(attention)
        options: Any = {"dtype": dtypes.pop(), "attn_implementation": kernel, "trust_remote_code": False}
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            try:
                # the config is another party's: no memory for sizes that its weights have not
                with torch.device("meta"):
                    claimed = AutoModelForCausalLM.from_config(config, **options)
                _check_weights(dict(claimed.named_parameters()), policy)
                model = AutoModelForCausalLM.from_config(config, **options)
            except TRANSFORMERS_REFUSALS as exc:
                raise ModelError(f"policy: {config.model_type} cannot be built: {exc}") from exc
        policy_model = cls(model.to(device).eval())
        policy_model.copy_weights(policy)
        return policy_model

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def device_name(self) -> str:
        """Device of its weights."""
        return str(self._model.device)

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its continuation may have together."""
        return int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 20)

    @property
    def named_weights(self) -> Mapping[str, Tensor]:
        """Its weights by the hub's names; shared, not copied."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    @cached_property
    def expert_routers(self) -> tuple[nn.Module, ...]:
        """The modules that choose experts, in the order in which they are run."""
        if not self.is_routed:
            return ()
        return tuple(module for name, module in self._model.named_modules() if name.endswith(f".{ROUTER}"))

    @cached_property
    def is_routed(self) -> bool:
        """Whether tokens ask experts: another rounding may choose others."""
        return family_of(self._model.config.model_type, "policy").facts.experts is not None

    def reads_alike(self, prompt: int, tokens: int) -> bool:
        """Tell whether one pass over a text computes the same as a cache, up to rounding.

        With longrope it does not where a text grows beyond the length at which rotations change: a cache keeps the keys
        of earlier tokens as they were. Rotations of ``dynamic`` change beyond the model's window, which no text leaves.

        Args:
            tokens: Number of tokens read: prompt and continuation.
        """
        return all(tokens <= limit or prompt > limit for limit in self._rotation_limits)

    @cached_property
    def _rotation_limits(self) -> frozenset[int]:
        rotations = getattr(self._model.config, "rope_parameters", None) or {}
        # of each kind of layer, or of all of them
        kinds = [settings for settings in (rotations, *rotations.values()) if isinstance(settings, dict)]
        return frozenset(
            int(settings["original_max_position_embeddings"])
            for settings in kinds
            if settings.get("rope_type") == "longrope"
        )

    def copy_weights(self, policy: RolloutPolicy) -> None:
        """Copy other weights of the same model in."""
        parameters = self.named_weights
        _check_weights(parameters, policy)
        with torch.no_grad():
            for name, tensor in policy.tensors.items():
                parameters[name].copy_(tensor)

    def read_prompts(self, ids: Tensor) -> tuple[ReadTexts, Cache]:
        """Read prompts of one length, ``[rows, tokens]``; what follows their last token, and the cache."""
        return self._read_ids(ids, None, 1)

    def read_next_tokens(self, tokens: Tensor, cache: Cache) -> ReadTexts:
        """Read one further token a row, ``[rows]``."""
        return self._read_ids(tokens[:, None], cache, 1)[0]

    def read_whole_texts(self, ids: Tensor, positions: int) -> ReadTexts:
        """Read whole texts at once, ``[rows, tokens]``; what follows each of their last tokens."""
        return self._read_ids(ids, None, positions)[0]

    def _read_ids(self, ids: Tensor, cache: Cache | None, positions: int) -> tuple[ReadTexts, Cache]:
        training = self._model.training
        if training:
            self._model.eval()
        self._states.clear()
        try:
            with torch.no_grad():
                outputs = self._model(
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
        return ReadTexts(outputs.logits[:, -positions:], states[:, -positions:]), outputs.past_key_values


@dataclass(frozen=True)
class KeptPolicy:
    """A policy as a model to read with.

    Attributes:
        config: Keys of the hub's config.json.
    """

    digest: str
    config: Mapping[str, object]
    model: PolicyModel

    @property
    def as_policy(self) -> RolloutPolicy:
        """The policy as data; the tensors are shared, not copied."""
        return RolloutPolicy(self.config, self.model.named_weights)


@dataclass
class KeptPolicies:
    """The last two policies: a worker may still be using the one before.

    Attributes:
        before: The one before that; None until there were two.
    """

    now: KeptPolicy | None = None
    before: KeptPolicy | None = None

    def keep_policy(self, policy: RolloutPolicy, device: str) -> None:
        """Keep a copy of these weights beside those before."""
        if self.now is not None and self.now.digest == policy.full_digest:
            return
        if self.before is None:
            model = PolicyModel.from_policy(policy, device=device)
        else:
            model = self.before.model
            model.copy_weights(policy)
        self.now, self.before = KeptPolicy(policy.full_digest, dict(policy.config), model), self.now
