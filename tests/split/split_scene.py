"""A split so small that a step takes milliseconds."""

import torch

from phalanx.data import IGNORE
from phalanx.models import LoraConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.split import SplitConfig
from phalanx.testing import SplitScenario, SplitSimulator

VOCAB, SEQ, HIDDEN, LAYERS = 64, 8, 16, 4


def split_config(mode="sealed", **changes) -> SplitConfig:
    allowed = {"insecure": True} if mode == "plaintext" else {"allow_insecure_sim": "tier" not in changes}
    return SplitConfig(**{"mode": mode, "cut": 2, "clients": 2, "chunk_bytes": 64, **allowed, **changes})


def make_scene(
    source,
    mode="sealed",
    *,
    seed=0,
    rows=1,
    microbatches=4,
    document_attention=False,
    precision="fp32",
    quantize=None,
    dora=False,
    **changes,
) -> SplitScenario:
    return SplitScenario(
        source=source,
        split=split_config(mode, **changes),
        adapter=LoraConfig(rank=2, quantize=quantize, dora=dora),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1, clip_norm=0.5),
        rows=rows,
        seq=SEQ,
        microbatches=microbatches,
        total_steps=20,
        seed=seed,
        document_attention=document_attention,
        precision=precision,
    )


def batch_of(step, *, seed=0, rows=1, microbatches=4):
    """Ids and labels by microbatch; the first ones have fewer targets."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = torch.randint(0, VOCAB, (microbatches, rows, SEQ + 1), generator=generator)
    labels = tokens[:, :, 1:].clone()
    labels[0, 0, :2] = IGNORE
    return [(tokens[at, :, :-1].contiguous(), labels[at]) for at in range(microbatches)]


def train(simulator: SplitSimulator, steps: int, *, seed=0, first=0, rows=1, microbatches=4):
    """Losses of so many steps."""
    taken = [
        simulator.step(batch_of(first + step, seed=seed, rows=rows, microbatches=microbatches)) for step in range(steps)
    ]
    return [(one.loss, one.norm) for one in taken]


def same(one, other) -> bool:
    """Whether two sets of tensors are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
