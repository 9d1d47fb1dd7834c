"""One rank of a probe: what parts of a model take on one core, while all other cores do the same."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.lab.bench.measure.harness import time_turns
from phalanx.lab.bench.measure.plain import adamw_options, decay_groups
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.lab.bench.parallel.rank_training import TrainingSpec
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage, open_model
from phalanx.objectives import causal_lm_loss
from phalanx.optimizers import gradient_norm_squared
from phalanx.parallel import RankEnv, join_ranks
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import keep_freed_memory, settle_numerics

_TIMES = 7
_NORMS = 8


@contextlib.contextmanager
def open_probe(body: dict[str, Any], place: RankEnv) -> Iterator[Act]:
    """Time a model's parts together with the others; see `phalanx.lab.bench.parallel.ranks.ArmRanks`."""
    spec = TrainingSpec.model_validate_json(body["spec"])
    settle_numerics(spec.run.train.threads)
    keep_freed_memory()
    source = open_model(spec.run.model, Path(spec.cache) / "models", spec.run.train.seed)
    with join_ranks(place, own_device("cpu", place), "00" * 32):
        yield lambda order: _probe_model(spec, source, order["rows"])


def _probe_model(spec: TrainingSpec, source: ModelSource, sizes: list[int]) -> dict[str, Any]:
    """Time stages without a head and the whole model, for some numbers of rows, and the optimizer's step.

    Returns:
        ``timed``: a list of blocks, whether there is a head, rows, and wall and CPU seconds of forward and backward;
        ``update``: wall and CPU seconds of norm and step over all parameters; ``norms``: those of one number of the
        residual stream through one norm and one sum; ``shares``: CPU seconds of blocks' forward pass, way back to
        their inputs and weights' gradients.
    """
    layers, tokens = source.num_layers, spec.run.data.sequence_length
    all_layers = _build_plain_stage(source, StageSpec(0, 1, 0, layers))
    # stages without a head
    counts = (max(1, layers // 4), layers - 1)
    stages = [_build_plain_stage(source, StageSpec(0, 2, 0, count)) for count in counts]
    timed = []
    for rows in sizes:
        ids = torch.randint(0, int(source.hub_config.vocab_size), (rows, tokens))
        for stage, count in zip(stages, counts, strict=True):
            wall, cpu = _median_seconds(lambda stage=stage, ids=ids: _run_both_ways(stage, ids))  # type: ignore[misc]
            timed.append({"blocks": count, "head": False, "rows": rows, "wall_s": wall, "cpu_s": cpu})
        wall, cpu = _median_seconds(lambda ids=ids: torch.autograd.backward(causal_lm_loss(all_layers(ids), ids)[0]))  # type: ignore[misc]
        timed.append({"blocks": layers, "head": True, "rows": rows, "wall_s": wall, "cpu_s": cpu})
    parameters = all_layers.all_parameters()
    optimizer = torch.optim.AdamW(
        decay_groups(parameters.values(), spec.run.optimizer), **adamw_options(spec.run.optimizer)
    )

    def update() -> None:
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        gradient_norm_squared(gradients)
        optimizer.step()

    wall, cpu = _median_seconds(update)
    middle = _build_plain_stage(source, StageSpec(1, 3, 1, layers - 1))
    shares = _pass_seconds(middle, max(sizes), tokens, int(source.hub_config.hidden_size))
    norms = _norm_seconds(max(sizes), tokens, int(source.hub_config.hidden_size))
    return {"timed": timed, "update": {"wall_s": wall, "cpu_s": cpu}, "norms": norms, "shares": shares}


def _pass_seconds(blocks: StageModule, rows: int, tokens: int, width: int) -> dict[str, float]:
    """CPU seconds of the three passes of blocks that take and give hidden states."""
    x = torch.randn(rows, tokens, width, requires_grad=True)

    def inputs() -> None:
        out = blocks(x)
        torch.autograd.grad(out, x, torch.ones_like(out))

    _, forward = _median_seconds(lambda: blocks(x))
    _, back = _median_seconds(inputs)
    _, backward = _median_seconds(lambda: _run_both_ways(blocks, x))
    return {"forward": forward, "inputs": max(0.0, back - forward), "weights": max(0.0, backward - back)}


def _norm_seconds(rows: int, tokens: int, width: int) -> dict[str, float]:
    """Wall and CPU seconds of one number of the stream through one norm and one sum, forward and backward."""
    norms = [nn.LayerNorm(width) for _ in range(_NORMS)]
    x = torch.randn(rows, tokens, width, requires_grad=True)

    def run() -> None:
        y = x
        for norm in norms:
            y = y + norm(y)
        torch.autograd.backward(y.sum())

    return {
        key: seconds / (_NORMS * x.numel())
        for key, seconds in zip(("wall_s", "cpu_s"), _median_seconds(run), strict=True)
    }


def _build_plain_stage(source: ModelSource, spec: StageSpec) -> StageModule:
    return build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)


def _run_both_ways(stage: StageModule, x: Tensor) -> None:
    out = stage(x)
    torch.autograd.backward(out, torch.ones_like(out))


def _median_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Median wall and CPU seconds, while the other ranks do the same."""
    samples = time_turns({"run": run}, _TIMES, before=lambda _: dist.barrier())["run"]
    return statistics.median(sample.wall_s for sample in samples), statistics.median(sample.cpu_s for sample in samples)
