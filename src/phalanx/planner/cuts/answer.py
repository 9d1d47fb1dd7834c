"""Every cut of a model with its memory, bytes and time: the usable ones in order of merit, the others with a reason."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.cluster.hardware import GIB
from phalanx.planner.cuts.leaks import Leak, LeakTable
from phalanx.planner.cuts.parties import Parties, PartyMachine
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import block_bytes, head_bytes, microbatch_tokens, peak_bytes
from phalanx.planner.model.compute import FORWARD, forward_flops
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.validity import describe_refusal

WIRE_BYTES = {"fp32": 4, "bf16": 2}
LABEL_BYTES = 8
ADAPTER_BYTES = 16
"""Of a trained number in fp32: itself, its gradient and two moments of AdamW."""

_FROZEN = 2
"""Products of a frozen matrix in a step, in forward passes: forward, and backward to its inputs."""
_SCORES = 3
"""The same for attention: both of its factors have gradients."""
_ALONE = Layout()


@dataclass(frozen=True)
class Cost:
    """The cost of a step at one cut.

    Attributes:
        client_bytes: Bytes of the front's weights, and of the working memory of one block.
        enclave_bytes: Bytes of the back's weights, of adapters with their optimizer, and of the backward pass.
        wire_bytes: Activations and labels of a step, all clients together.
        client_s: Seconds of one client's front, a microbatch.
        wire_s: Seconds on the link, a microbatch.
        enclave_s: Seconds of the back, forward and backward, a microbatch.
        step_s: Seconds of the whole step; the three parties work at the same time on different microbatches.
    """

    client_bytes: int
    enclave_bytes: int
    wire_bytes: int
    client_s: float
    wire_s: float
    enclave_s: float
    step_s: float


def cost_of(shape: ModelShape, recipe: Recipe, parties: Parties, depth: int) -> Cost:
    """Return the cost of a cut."""
    tokens, back = microbatch_tokens(_ALONE, recipe), shape.layers - depth
    flops = forward_flops(shape, recipe.sequence_length)
    # each client has its share of the microbatches, and they work side by side
    client_s = tokens * depth * (flops.block + flops.scores) / parties.client.flops_per_s / parties.clients
    work = back * (_FROZEN * flops.block + _SCORES * flops.scores) + _FROZEN * flops.head
    work += 3 * FORWARD * back * adapter_numbers(shape, parties.adapter_rank)
    enclave_s = tokens * work / parties.enclave.flops_per_s
    link = parties.link_as_used()
    sent = tokens * (shape.hidden * WIRE_BYTES[parties.wire] + LABEL_BYTES)
    wire_s = sent / link.bytes_per_s
    stages = (client_s, wire_s, enclave_s)
    return Cost(
        client_bytes=_client_bytes(shape, recipe, depth),
        enclave_bytes=_enclave_bytes(shape, recipe, parties, back),
        wire_bytes=sent * recipe.microbatches,
        client_s=client_s,
        wire_s=wire_s,
        enclave_s=enclave_s,
        # the activation on its way, and the loss on its way back
        step_s=sum(stages) + (recipe.microbatches - 1) * max(stages) + 2 * link.latency_s,
    )


def adapter_numbers(shape: ModelShape, rank: int) -> int:
    """Return the trained numbers of one block: LoRA on queries and values."""
    queries, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return rank * (2 * shape.hidden + queries + values)


def _client_bytes(shape: ModelShape, recipe: Recipe, depth: int) -> int:
    weights = (shape.embedding + depth * shape.layer_parameters) * recipe.weight_bytes
    sent = microbatch_tokens(_ALONE, recipe) * shape.hidden * recipe.stream_bytes
    return weights + sent + (block_bytes(shape, _ALONE, recipe) if depth else 0)


def _enclave_bytes(shape: ModelShape, recipe: Recipe, parties: Parties, back: int) -> int:
    # a tied head is a copy of the embedding here
    weights = (back * shape.layer_parameters + shape.final + shape.head_matrix) * recipe.weight_bytes
    adapters = back * adapter_numbers(shape, parties.adapter_rank) * ADAPTER_BYTES
    activations = back * block_bytes(shape, _ALONE, recipe) + peak_bytes(shape, _ALONE, recipe)
    return weights + adapters + activations + head_bytes(shape, _ALONE, recipe)


@dataclass(frozen=True)
class PricedCut:
    """One cut.

    Attributes:
        depth: Blocks that the client runs.
        recipe: Recipe with the number of microbatches that is best for this cut.
        leak: Share that the host recovers.
        reason: Why it cannot be used; None where it can.
    """

    depth: int
    recipe: Recipe
    cost: Cost
    leak: Leak
    reason: str | None

    def cut_row(self) -> dict[str, Any]:
        """Return the cut as one flat object."""
        cost = self.cost
        return {
            "cut": self.depth,
            "microbatches": self.recipe.microbatches,
            "step_s": cost.step_s,
            "client_gib": cost.client_bytes / GIB,
            "enclave_gib": cost.enclave_bytes / GIB,
            "wire_mb": cost.wire_bytes / 1e6,
            "client_s": cost.client_s,
            "wire_s": cost.wire_s,
            "enclave_s": cost.enclave_s,
            "leak": self.leak.seen,
            "leak_if_opened": self.leak.opened,
            "chance": self.leak.chance,
            "leak_basis": self.leak.basis,
        }


@dataclass(frozen=True)
class CutAnswer:
    """The planner's answer about every cut."""

    model: str
    shape: ModelShape
    recipe: Recipe
    parties: Parties
    leaks: LeakTable
    cuts: tuple[PricedCut, ...]

    @property
    def usable_cuts(self) -> list[PricedCut]:
        """The cuts that can be used: the fastest first, of equally fast ones that with the least in the enclave."""
        fitting = [cut for cut in self.cuts if cut.reason is None]
        return sorted(fitting, key=lambda cut: (cut.cost.step_s, cut.cost.enclave_bytes))

    def require_cut(self, depth: int | None = None) -> PricedCut:
        """Return the best cut, or the requested one.

        Raises:
            ConfigError: It cannot be used; the message names the nearest that can, or says why none can.
        """
        usable = self.usable_cuts
        if depth is None:
            if usable:
                return usable[0]
            raise ConfigError(f"plan: no cut of {self.model} can be used: {self._describe_reasons()}").with_facts(
                code="PHX-C020"
            )
        if not 0 <= depth < len(self.cuts):
            raise ConfigError(
                f"--cut {depth}: {self.model} has {len(self.cuts)} layers; give 1 to {len(self.cuts) - 1}, "
                "so that both sides have one at least"
            )
        chosen_cut = self.cuts[depth]
        if chosen_cut.reason is None:
            return chosen_cut
        near = min(usable, key=lambda cut: (abs(cut.depth - depth), cut.cost.step_s), default=None)
        hint = (
            f"the nearest cut that works is {near.depth}" if near else f"no other cut works: {self._describe_reasons()}"
        )
        raise ConfigError(f"--cut {depth}: {chosen_cut.reason}; {hint}")

    def as_json(self) -> dict[str, Any]:
        """Return question, assumptions and answer as one JSON object."""
        link = self.parties.link_as_used()
        return {
            "name": "split-plan",
            "model": {"name": self.model, **asdict(self.shape), "parameters": self.shape.num_parameters},
            "recipe": asdict(self.recipe),
            "parties": self.parties.model_dump(mode="json"),
            "link_as_used": link.model_dump(),
            "leaks": {
                "model": self.leaks.model.model_dump(),
                "command": self.leaks.command,
                "commit": self.leaks.commit,
            },
            "rows": [cut.cut_row() for cut in self.usable_cuts],
            "refused": [{"cut": cut.depth, "reason": cut.reason} for cut in self.cuts if cut.reason is not None],
        }

    def _describe_reasons(self) -> str:
        # the first and the last cut are limited by different sides
        ends = (self.cuts[min(1, len(self.cuts) - 1)], self.cuts[-1])
        return "; ".join(dict.fromkeys(f"cut {cut.depth}: {cut.reason}" for cut in ends))


def ask_cuts(model: str, shape: ModelShape, recipe: Recipe, parties: Parties, leaks: LeakTable) -> CutAnswer:
    """Judge every cut of a model."""
    wrong = describe_refusal(Layout(), shape, replace(recipe, microbatches=1))
    if wrong is not None:
        raise ConfigError(f"plan: {wrong}")
    cuts = tuple(_judge_cut(shape, recipe, parties, leaks, depth) for depth in range(shape.layers))
    return CutAnswer(model, shape, recipe, parties, leaks, cuts)


def _judge_cut(shape: ModelShape, recipe: Recipe, parties: Parties, leaks: LeakTable, depth: int) -> PricedCut:
    """Choose the number of microbatches that is fastest among the ones that fit, else the one that needs least."""
    leak = leaks.leak_at(shape, depth, parties.mode)
    options = []
    for number in [divisor for divisor in range(1, recipe.sequences + 1) if recipe.sequences % divisor == 0]:
        variant = replace(recipe, microbatches=number)
        cost = cost_of(shape, variant, parties, depth)
        reason = _describe_bad_split(depth, shape.layers - depth, parties) or _describe_refusal(cost, leak, parties)
        options.append(PricedCut(depth, variant, cost, leak, reason))
    usable = [option for option in options if option.reason is None]
    if usable:
        return min(usable, key=lambda option: option.cost.step_s)
    return min(options, key=lambda option: option.cost.enclave_bytes)


def _describe_bad_split(front: int, back: int, parties: Parties) -> str | None:
    if front < 1:
        return "the client has no block, and the engine gives it one at least"
    if back < parties.min_back:
        return f"{back} blocks are left to adapt, at least {parties.min_back} are wanted"
    return None


def _describe_refusal(cost: Cost, leak: Leak, parties: Parties) -> str | None:
    # what no machine can mend comes first
    if leak.beyond_chance > parties.max_leak:
        return (
            f"{parties.mode}: the host recovers {leak.seen:.1%} of the tokens ({leak.basis}), {leak.chance:.1%} by "
            f"chance, at most {parties.max_leak:.1%} more are allowed"
            + ("; take mode sealed" if parties.mode == "plaintext" else "")
        )
    return _describe_excess("enclave", cost.enclave_bytes, parties.enclave) or _describe_excess(
        "client", cost.client_bytes, parties.client
    )


def _describe_excess(side: str, needed: int, machine: PartyMachine) -> str | None:
    if needed <= machine.usable_bytes:
        return None
    return f"the {side} needs {needed / GIB:.3g} GiB, {machine.usable_bytes / GIB:.3g} are usable"
