"""How tensor parallel ranks share the blocks of each family: one table, by the names of transformers' modules."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPlan:
    """The shared matrices of one block.

    Attributes:
        columns: Linear layers of which each rank has some outputs, with the matrices that lie side by side in them.
        rows: Linear layers of which each rank has the inputs that belong to those; their outputs are summed.
        entries: Modules whose first input is where the shared work begins.
        attention: The module that knows its number of heads.
        per_head: Its attributes that are divided by the number of ranks.
    """

    columns: Mapping[str, int]
    rows: tuple[str, ...]
    entries: tuple[str, ...]
    attention: str
    per_head: tuple[str, ...]


PLANS: dict[str, BlockPlan] = {
    "gpt2": BlockPlan(
        columns={"attn.c_attn": 3, "mlp.c_fc": 1},
        rows=("attn.c_proj", "mlp.c_proj"),
        entries=("attn", "mlp"),
        attention="attn",
        per_head=("num_heads", "split_size"),
    ),
    "opt": BlockPlan(
        columns={"self_attn.q_proj": 1, "self_attn.k_proj": 1, "self_attn.v_proj": 1, "fc1": 1},
        rows=("self_attn.out_proj", "fc2"),
        entries=("self_attn", "fc1"),
        attention="self_attn",
        per_head=("num_heads",),
    ),
    "llama": BlockPlan(
        columns={
            "self_attn.q_proj": 1,
            "self_attn.k_proj": 1,
            "self_attn.v_proj": 1,
            "mlp.gate_proj": 1,
            "mlp.up_proj": 1,
        },
        rows=("self_attn.o_proj", "mlp.down_proj"),
        entries=("self_attn", "mlp"),
        attention="self_attn",
        per_head=(),
    ),
    # query, key and value of one head lie together, so that rows of the fused matrix can be dealt out as they are
    "bloom": BlockPlan(
        columns={"self_attention.query_key_value": 1, "mlp.dense_h_to_4h": 1},
        rows=("self_attention.dense", "mlp.dense_4h_to_h"),
        entries=("self_attention", "mlp"),
        attention="self_attention",
        per_head=("num_heads",),
    ),
}
