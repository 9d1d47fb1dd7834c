"""One rank's stages in the order of a schedule; without a pipeline, microbatches one behind the other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from phalanx.models.families import head_of
from phalanx.parallel.data.data_parallel import average_gradients, averages_afterwards, microbatch_scope
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.planner import SCHEDULES

_GRADIENTS_ALONE = 2
"""ZeRO level at which parameters are shared between steps only."""

Loss = Callable[[Tensor, Tensor], Tensor]
RunStep = Callable[[Tensor, Tensor, Tensor | None], None]
"""Forward and backward of a step from this rank's ids and labels, and what each row says of its attention, where it
does; gradients stay in the parameters."""


def accumulate_gradients(module: nn.Module, domain: Domain, microbatches: int, loss: Loss) -> RunStep:
    """Return a function that runs the microbatches of a rank that has all layers.

    Args:
        module: Module from `share_with_copies`.
        microbatches: Equal parts of the rows.
        loss: Function from logits and labels to the differentiated number.
    """
    keeps_whole = domain.config.zero == _GRADIENTS_ALONE

    def run(ids: Tensor, labels: Tensor, seen: Tensor | None) -> None:
        of_rows = [None] * microbatches if seen is None else seen.chunk(microbatches)
        parts = zip(ids.chunk(microbatches), labels.chunk(microbatches), of_rows, strict=True)
        for number, (x, y, targets) in enumerate(parts, start=1):
            with microbatch_scope(module, is_last=number == microbatches, keeps_whole=keeps_whole):
                torch.autograd.backward(loss(module(x, targets), y))

    return run


def build_pipeline(
    parts: Sequence[StagePart],
    modules: Sequence[nn.Module],
    domain: Domain,
    shape: tuple[int, int],
    microbatches: int,
    loss: Loss,
) -> RunStep:
    """Return a function that runs a pipeline.

    Shapes are given, and so fixed: otherwise torch's stages would tell each other by pickle.

    Args:
        parts: This rank's, in the order of the model.
        modules: Modules to call in place of the parts.
        shape: Rows of a microbatch, and tokens of a whole row.
        microbatches: Equal parts of this rank's rows.
        loss: Function from logits and labels to the differentiated number.
    """
    stages = [
        PipelineStage(
            module,
            part.stage.spec.index,
            part.stage.spec.num_stages,
            domain.device,
            input_args=_input_sample(part, domain, shape),
            output_args=_output_sample(part, domain, shape),
            group=domain.pipeline,
        )
        for part, module in zip(parts, modules, strict=True)
    ]
    build = getattr(pipelining, SCHEDULES[domain.config.schedule].torch_class)
    takes_several = issubclass(build, PipelineScheduleMulti)
    schedule = build(stages if takes_several else stages[0], microbatches, loss, scale_grads=False)
    has_first = any(part.stage.spec.is_first for part in parts)
    has_last = any(part.stage.spec.is_last for part in parts)

    def run(ids: Tensor, labels: Tensor, seen: Tensor | None) -> None:
        inputs = (ids,) if has_first else ()
        # every stage is called with these: each rank has the whole batch
        of_rows = {} if seen is None else {"seen": seen}
        schedule.step(*inputs, target=labels if has_last else None, return_outputs=False, **of_rows)
        if averages_afterwards(domain.config):
            for part in parts:
                average_gradients(part, domain)

    return run


def _hidden_sample(part: StagePart, domain: Domain, shape: tuple[int, int]) -> Tensor:
    rows, tokens = shape
    size = part.stage.hidden_shape(rows, tokens // part.num_slices)
    return torch.empty(size, device=domain.device, requires_grad=True)


def _input_sample(part: StagePart, domain: Domain, shape: tuple[int, int]) -> Tensor:
    if part.stage.spec.is_first:
        return torch.zeros(shape, dtype=torch.int64, device=domain.device)
    return _hidden_sample(part, domain, shape)


def _output_sample(part: StagePart, domain: Domain, shape: tuple[int, int]) -> Tensor:
    if not part.stage.spec.is_last:
        return _hidden_sample(part, domain, shape)
    rows, tokens = shape
    ranks = domain.config.tp if part.cut.shares_vocabulary else 1
    kind, vocab = head_of(part.stage.hub_config), int(part.stage.hub_config.vocab_size)
    columns = {"lm": vocab // ranks, "score": 1, "lm_and_score": vocab + 1}[kind]
    return torch.empty((rows, tokens // domain.config.cp, columns), device=domain.device, requires_grad=True)
