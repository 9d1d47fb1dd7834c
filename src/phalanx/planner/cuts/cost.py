"""Memory, bytes and time of one cut."""

from dataclasses import dataclass

from phalanx.planner.cuts.parties import Parties
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import block_bytes, head_bytes, microbatch_tokens, peak_bytes
from phalanx.planner.model.compute import FORWARD, forward_flops
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape

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
    """Return the cost of a cut.

    Args:
        parties: A client, the enclave and the link between them.

    Raises:
        ConfigError: The link is not known.
    """
    tokens, back = microbatch_tokens(_ALONE, recipe), shape.layers - depth
    flops = forward_flops(shape, recipe.sequence_length)
    # each client has its share of the microbatches, and they work side by side
    client_s = tokens * depth * (flops.block + flops.scores) / parties.client.flops / parties.clients
    work = back * (_FROZEN * flops.block + _SCORES * flops.scores) + _FROZEN * flops.head
    work += 3 * FORWARD * back * adapter_numbers(shape, parties.adapter_rank)
    enclave_s = tokens * work / parties.enclave.flops
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
    weights = (shape.embedding + depth * shape.layer) * recipe.weight_bytes
    sent = microbatch_tokens(_ALONE, recipe) * shape.hidden * recipe.stream_bytes
    return weights + sent + (block_bytes(shape, _ALONE, recipe) if depth else 0)


def _enclave_bytes(shape: ModelShape, recipe: Recipe, parties: Parties, back: int) -> int:
    # a tied head is a copy of the embedding here
    weights = (back * shape.layer + shape.final + shape.head_matrix) * recipe.weight_bytes
    adapters = back * adapter_numbers(shape, parties.adapter_rank) * ADAPTER_BYTES
    activations = back * block_bytes(shape, _ALONE, recipe) + peak_bytes(shape, _ALONE, recipe)
    return weights + adapters + activations + head_bytes(shape, _ALONE, recipe)
