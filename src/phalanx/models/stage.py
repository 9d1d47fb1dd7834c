"""One stage of a model: its own blocks, with the whole model's names."""

import copy
import hashlib
import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.errors import ModelError
from phalanx.models.config import AttentionKind
from phalanx.models.family import (
    CAUSAL,
    HEAD,
    MARKED_KINDS,
    AttentionPattern,
    Family,
    join_marks,
    split_marks,
)
from phalanx.models.layout import StageSpec
from phalanx.models.quiet import one_at_a_time
from phalanx.models.routing import RouterBalance
from phalanx.planner.model.config_keys import ConfigKeys

MAGNITUDE = ".lora_magnitude_vector"
"""End of the name of the sizes that DoRA learns, as peft's files have it."""

PREFIX = "prefix"
"""The part of a block that has keys and values of virtual tokens, where an adapter has added one."""


PROMPT = "prompt_encoder"
"""The part of the stage that embeds which makes virtual tokens before the text, where an adapter has added one."""


class EmbeddingNoise:
    """Uniform noise of a stage that embeds.

    It is drawn from the run's seed, the step and the tokens of a row alone, on the CPU: a recomputation, a redone step
    and every layout of ranks and microbatches see the same. Rows of the same tokens in one step get the same noise.

    Args:
        alpha: Its size: each number is drawn between ``-a`` and ``a``, ``a = alpha / sqrt(tokens * hidden)``.

    Source: Jain et al. 2023 (NEFTune).
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._begins = ""

    def begin_step(self, seed: int, step: int) -> None:
        """Take the noise of a step from here on."""
        self._begins = f"phalanx neftune {seed} {step} "

    def sample_noise(self, ids: Tensor, hidden_size: int) -> Tensor:
        """The noise of rows of tokens.

        Args:
            ids: int64 ``[batch, seq]``.

        Returns:
            float32 ``[batch, seq, hidden]``.
        """
        batch, seq = ids.shape
        noise = torch.empty(batch, seq, hidden_size)
        for row, tokens in zip(noise, ids.cpu(), strict=True):
            text = self._begins.encode() + tokens.contiguous().numpy().tobytes()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
            row.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(seed))
        return noise.mul_(self._alpha / math.sqrt(seq * hidden_size))


class AbsentPart(nn.Module):
    """A placeholder with the name of a part that another stage holds; it cannot be called."""


class StageModule(nn.Module):
    """A slice of a causal language model.

    The stage that embeds takes ids (int64 ``[batch, seq]``), the others hidden states ``[batch, seq, hidden]``;
    the last returns logits ``[batch, seq, vocab]``, the others hidden states. Positions count from 0,
    attention is causal over the whole row unless a call says otherwise, no cache is kept. Dropout draws
    from torch's global generator: seed it right before a call that has to be repeatable.

    Guarantees:
        The chain of all stages computes what transformers' whole model computes, in the same order of
        operations, forward and backward.
    """

    def __init__(
        self, whole: nn.Module, family: Family, spec: StageSpec, *, activation_checkpointing: bool = False
    ) -> None:
        """`whole`: the model on the meta device, of which this stage's own parts are copied."""
        super().__init__()
        self.hub_config: Any = copy.deepcopy(whole.config)
        twins: dict[int, Any] = {id(part): AbsentPart() for part in _foreign_parts(whole, family, spec)}
        twins[id(whole.config)] = self.hub_config
        _copy_modules(whole, twins)
        for name, child in whole.named_children():
            self.add_module(name, twins[id(child)])
        self.family = family
        self.spec = spec
        self.activation_checkpointing = activation_checkpointing
        self.num_virtual_tokens = 0
        """How many keys and values of an adapter every block puts before its own."""
        self.num_prompt_tokens = 0
        """How many virtual tokens of an adapter come before the text in what crosses between stages."""
        self.attends: AttentionKind = family.usual_attention
        """Which tokens see which; what each row says of it stands behind its tokens, in inputs and hidden outputs."""
        self.router_share = 0.0
        """Weight of a microbatch's router losses in the gradient: its share of a step; 0 leaves them out."""
        self.embedding_noise: EmbeddingNoise | None = None
        """What is added to embeddings while training, where anything is; it is told every step."""
        self.masters: dict[str, nn.Parameter] = {}
        """What stands for trained parameters where the stage computes with narrower ones; see `keep_masters`."""
        self.computing: dict[str, nn.Parameter] = {}
        """Those narrower ones, by the same names."""
        self._head_is_shared = False
        self._gives_logits = True
        self._max_positions = family.max_positions(self.hub_config)

    @property
    def trunk(self) -> Any:
        """The module that holds embeddings, blocks and final norm."""
        return self.get_submodule(self.family.trunk)

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks of this stage, in order."""
        return self.family.all_blocks(self.trunk)[self.spec.first_layer : self.spec.end_layer]

    @property
    def ties_head(self) -> bool:
        """True where the config says that the head is the token embedding."""
        return self.family.ties_head(self.hub_config)

    @property
    def shared_head(self) -> nn.Parameter | None:
        """The head's weight where it is the first stage's embedding, in another module of this process."""
        return (
            self.get_parameter(self.family.head_weight)
            if self._head_is_shared and not self.spec.has_embedding
            else None
        )

    def stage_heads(self) -> dict[str, nn.Module]:
        """Return the heads of the last stage by name, the language model's first."""
        return self.family.head_modules(self)

    def hidden_shape(self, batch: int, seq: int) -> tuple[int, int, int]:
        """Return the shape of the tensor that passes between stages."""
        beside = self.family.facts.rows_beside(ConfigKeys(vars(self.hub_config), "model config"))
        return (batch, self.num_prompt_tokens + seq + beside, int(self.hub_config.hidden_size))

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Return this stage's parameters by canonical name, in the model's order, tied ones once.

        Names are those of the whole model without adapters; an adapter adds ``.lora_A.weight`` and ``.lora_B.weight``
        (DoRA also ``.lora_magnitude_vector``) to the name of its layer. They do not depend on the layout of stages.
        """
        parameters = {
            canonical_name(name): parameter
            for name, parameter in self.named_parameters()
            if not (self._head_is_shared and name == self.family.head_weight)
        }
        return {**parameters, **self.masters}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates: with an adapter the adapter only, else all."""
        return {name: value for name, value in self.all_parameters().items() if value.requires_grad}

    def forward(self, x: Tensor, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Run the stage.

        Args:
            x: Ids ``[batch, seq]`` for the stage that embeds, else hidden states ``[batch, seq, hidden]``; with
                kinds of attention that each row says more about with marks behind them, as `with_marks` has it.
            pattern: Which tokens see which, the same for all stages of one call; taken from `attends` and marks when
                left out.

        Returns:
            Logits ``[batch, seq, vocab]`` of the last stage, or scores ``[batch, seq, 1]``, or both side by side; else
            hidden states ``[batch, seq, hidden]``, with the marks behind them where the input has them.
        """
        is_marked = self.attends in MARKED_KINDS and pattern is CAUSAL
        if is_marked:
            x, pattern = split_marks(x, self.attends, embeds=self.spec.has_embedding)
        elif self.attends != "causal" and pattern is CAUSAL:
            pattern = AttentionPattern(self.attends)
        x = self.with_prompt(x) if self.spec.has_embedding else x
        self._check_input(x)
        trunk = self.trunk
        before = self.num_virtual_tokens
        self.family.check_pattern(pattern, before + self.num_prompt_tokens)
        pattern.check_shape(*x.shape[:2])
        hidden = self.family.embed(trunk, x, before, pattern) if self.spec.has_embedding else x
        context = self.family.context(trunk, self.hub_config, hidden, before, pattern)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        balance = self.router_balance()
        for layer, block in enumerate(self.own_blocks, self.spec.first_layer):
            block_context = self.with_prefix(block, self.family.block_context(self.hub_config, context, layer))
            if recompute:
                hidden = checkpoint(run_block, block, hidden, block_context, self.family, balance, use_reentrant=False)
            else:
                hidden = run_block(block, hidden, block_context, self.family, balance)
        if self.spec.is_last:
            return self.family.output_logits(self, self.without_prompt(hidden), pattern)
        return join_marks(hidden, pattern) if is_marked else hidden

    def router_balance(self) -> RouterBalance | None:
        """Return what a block's router learns of its own loss in this pass; None where it learns none."""
        learns = self.training and torch.is_grad_enabled()
        return self.family.router_balance(self.hub_config, self.router_share) if learns else None

    def with_prompt(self, ids: Tensor) -> Tensor:
        """Return ids ``[batch, seq]`` with places before them for an adapter's virtual tokens, where there are any."""
        return nn.functional.pad(ids, (self.num_prompt_tokens, 0)) if self.num_prompt_tokens else ids

    def without_prompt(self, hidden: Tensor) -> Tensor:
        """Return the last block's output for the text alone, for which alone something is predicted."""
        return hidden[:, self.num_prompt_tokens :]

    def with_prefix(self, block: nn.Module, context: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a block, with the virtual tokens that an adapter has added."""
        prefix = getattr(block, PREFIX, None)
        return context if prefix is None else context | {self.family.past_key: prefix}

    def replace_head(self, head: nn.Module) -> None:
        """Put another head in the place of the language model's; its outputs are left as they are."""
        if not self.spec.is_last:
            raise ModelError(f"stage {self.spec.index}: has no head; another head belongs to the last part")
        if self.family.scoring != (HEAD,):
            raise ModelError(f"{self.family.model_type}: its head is more than one layer, and none is put in its place")
        self.add_module(HEAD, head)
        self._gives_logits = False

    def through_heads(self, hidden: Tensor) -> Tensor:
        """Turn the output of the family's `finish` into the heads' output for each token."""
        if self.family.scoring != (HEAD,):
            return self.family.score_hidden(self, self.hub_config, hidden)
        scores: list[Tensor] = []
        for name, head in self.stage_heads().items():
            logits = head(hidden)
            is_scaled = name == HEAD and self._gives_logits
            scores.append(self.family.scale_logits(self.hub_config, logits) if is_scaled else logits)
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)

    def _check_input(self, x: Tensor) -> None:
        expected = "[batch, seq]" if self.spec.has_embedding else f"[batch, seq, {self.hub_config.hidden_size}]"
        if x.dim() != (2 if self.spec.has_embedding else 3) or (
            not self.spec.has_embedding and x.shape[2] != self.hub_config.hidden_size
        ):
            raise ModelError(f"stage {self.spec.index}: found input of shape {list(x.shape)}; expected {expected}")
        tokens = x.shape[1] + self.num_virtual_tokens
        if self._max_positions is not None and tokens > self._max_positions:
            added = self.num_virtual_tokens + self.num_prompt_tokens
            virtual = f", {added} of them virtual" if added else ""
            raise ModelError(
                f"stage {self.spec.index}: found a sequence of {tokens} tokens{virtual}; the model has "
                f"{self._max_positions} positions; lower sequence_length"
            )


def add_embedding_noise(stage: StageModule, alpha: float | None) -> None:
    """Have a stage that embeds add noise while it trains; without `alpha`, and for other stages, nothing is changed.

    A stage that has it already keeps it.
    """
    if alpha is None or not stage.spec.has_embedding or stage.embedding_noise is not None:
        return
    noise = stage.embedding_noise = EmbeddingNoise(alpha)

    def disturb(module: Any, given: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        if not module.training:
            return None
        return embedded + noise.sample_noise(given[0], embedded.shape[-1]).to(embedded.device, embedded.dtype)

    stage.get_submodule(stage.family.embedding_weight.rpartition(".")[0]).register_forward_hook(disturb)


def tie_head(first: StageModule, last: StageModule) -> None:
    """Make the last stage's head the very embedding of the first, where the config ties them.

    Both must live in one process. Afterwards one gradient collects both uses, and only `first` lists
    the weight.
    """
    if not first.spec.has_embedding or not last.spec.is_last or first.family is not last.family:
        raise ModelError(
            f"stages {first.spec.index} and {last.spec.index} of {first.spec.num_stages}: only the first and "
            "the last stage of one model can be tied"
        )
    if not first.ties_head or first is last:
        return
    embedding = first.get_parameter(first.family.embedding_weight)
    head = first.family.head_weight
    if last.get_parameter(head).shape != embedding.shape:
        raise ModelError(f"{head}: shape differs from {first.family.embedding_weight}; cannot be tied")
    # peft's patch of torch in another thread would put the weight on the meta device, where products are garbage
    with one_at_a_time():
        setattr(last.get_submodule(first.family.head), "weight", embedding)  # noqa: B010 - mypy knows no submodule's members
    last._head_is_shared = True


def canonical_name(name: str) -> str:
    """Return the name of a parameter without the layers that adapters wrap around it."""
    return (
        name.replace(".base_layer.", ".")
        .replace(".lora_A.default.", ".lora_A.")
        .replace(".lora_B.default.", ".lora_B.")
        .replace(f"{MAGNITUDE}.default.weight", MAGNITUDE)
    )


def run_block(
    block: nn.Module, hidden: Tensor, context: dict[str, Any], family: Family, balance: RouterBalance | None = None
) -> Tensor:
    """Run one block, with the gradient of its router's loss where there is one."""
    if balance is not None:
        return balance.run_block(block, lambda: run_block(block, hidden, context, family))
    out = family.call_block(block, hidden, context)
    # some families return attention weights or a cache beside the hidden states
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _copy_modules(whole: nn.Module, twins: dict[int, Any]) -> None:
    """Give each module and parameter a twin with tables of its own, where `twins` has none for it yet.

    As `copy.deepcopy`, which takes ten times as long: it copies the dozen empty tables of every module one by one.
    """
    pairs: list[tuple[nn.Module, nn.Module]] = []
    waiting = list(whole.children())
    while waiting:
        module = waiting.pop()
        if id(module) in twins:
            continue
        twin = twins[id(module)] = object.__new__(type(module))
        for name, value in vars(module).items():
            vars(twin)[name] = value.copy() if isinstance(value, dict | set) else twins.get(id(value), value)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in twins:
                twins[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            twin._parameters[name] = twins[id(parameter)]
        pairs.append((module, twin))
        waiting += module.children()
    for module, twin in pairs:
        twin._modules.update({name: part and twins[id(part)] for name, part in module._modules.items()})


def _foreign_parts(whole: nn.Module, family: Family, spec: StageSpec) -> Iterator[nn.Module]:
    """The parts of a model that other stages hold."""
    trunk = whole.get_submodule(family.trunk)
    names = () if spec.has_embedding else family.first_parts
    names += () if spec.is_last else family.last_parts
    blocks = family.all_blocks(trunk)
    for layer in {*range(len(blocks))} - {*range(spec.first_layer, spec.end_layer)}:
        names += family.parts_beside(whole.config, layer)
    yield from (part for name in names if (part := attrgetter(name)(trunk)) is not None)
    yield from (*blocks[: spec.first_layer], *blocks[spec.end_layer :])
    if not spec.is_last:
        yield from family.head_modules(whole).values()
