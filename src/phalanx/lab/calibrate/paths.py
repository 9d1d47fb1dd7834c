"""The ways in which one stage can be computed on this machine, and how to switch between them."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.models import FAMILIES, StageModule
from phalanx.pipeline import StageCopy, StageRunner, StepPlan, WideRunner

Kernel = Literal["math", "flash", "efficient"]
_BACKENDS: dict[Kernel, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class NumericPath:
    """One way to compute; None keeps the run's value.

    Attributes:
        precision: "fp32", "bf16" (autocast) or "fp64".
        compiled: Whether the stage goes through torch.compile.
    """

    name: str
    precision: Literal["fp32", "bf16", "fp64"]
    threads: int | None = None
    kernel: Kernel | None = None
    mkldnn: bool = True
    compiled: bool = False
    device: str | None = None

    @property
    def has_own_weights(self) -> bool:
        """Whether its stage is a copy that must be made again when the weights have changed."""
        return self.precision == "fp64" or self.device is not None

    @contextlib.contextmanager
    def switch_process(self) -> Iterator[None]:
        """Switch this process over, and back again; what torch warns of meanwhile is not the user's business."""
        threads = torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if self.kernel is not None:
                stack.enter_context(sdpa_kernel(_BACKENDS[self.kernel]))
            if not self.mkldnn:
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            if self.compiled:
                # beyond its limit torch would go back to eager in silence
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=999, fail_on_recompile_limit_hit=True))
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(self.threads or threads)
            yield

    def make_runner(self, plan: StepPlan, stage: StageCopy) -> StageRunner:
        """Make what recomputes a stage in this way."""
        if self.precision == "fp64":
            return WideRunner(stage.runner)
        device = self.device or plan.device
        module = copy.deepcopy(stage.module).to(device) if self.device is not None else stage.module
        if self.compiled:
            # the compiled module hands every attribute that a runner asks for on to the stage's own
            # and draws dropout masks as the eager one does
            module = cast(StageModule, torch.compile(module, options={"fallback_random": True}))
        return StageRunner(module, stage.spec, seed=plan.seed, precision=self.precision, device=device)


@dataclass(frozen=True)
class PathPair:
    """A reference path and the path that is compared with it."""

    reference: NumericPath
    path: NumericPath

    @property
    def coarser_precision(self) -> str:
        """The coarser of the two: bf16 where either is."""
        return "bf16" if "bf16" in (self.reference.precision, self.path.precision) else "fp32"


def pairs_of(plan: StepPlan) -> tuple[list[PathPair], dict[str, str]]:
    """All pairs to measure, fp32 ones first, and why others are not among them.

    Args:
        plan: The run; its own settings are the reference.

    Returns:
        The pairs, and reasons by the name of the path. Whether this machine has a path shows when it is tried.
    """
    absent: dict[str, str] = {}
    pairs = []
    fp32, bf16 = NumericPath("fp32", "fp32"), NumericPath("bf16", "bf16")
    for reference in (fp32, bf16):
        pairs += [PathPair(reference, path) for path in _path_variations(reference, plan, absent)]
    return [*pairs, PathPair(fp32, NumericPath("fp64", "fp64")), PathPair(fp32, bf16)], absent


def _path_variations(reference: NumericPath, plan: StepPlan, absent: dict[str, str]) -> Iterator[NumericPath]:
    kind = reference.precision
    other = 2 if torch.get_num_threads() == 1 else 1
    yield replace(reference, name=f"{kind}, {other} thread{'s' * (other > 1)}", threads=other)
    for kernel in _BACKENDS:
        name = f"{kind}, {kernel} attention"
        if FAMILIES[plan.hub_config["model_type"]].choose_kernel(plan.attention) == "sdpa":
            yield replace(reference, name=name, kernel=kernel)
        else:
            absent[name] = "the run's attention is eager, which has one kernel"
    name = f"{kind}, no oneDNN"
    if torch.device(plan.device).type == "cpu" and torch._C._has_mkldnn:
        yield replace(reference, name=name, mkldnn=False)
    else:
        absent[name] = "the run's device does not compute with oneDNN"
    yield replace(reference, name=f"{kind}, compiled", compiled=True)
    name = f"{kind}, GPU"
    if torch.device(plan.device).type == "cpu" and torch.cuda.is_available():
        yield replace(reference, name=name, device="cuda")
    else:
        absent[name] = "torch finds no GPU" if not torch.cuda.is_available() else "the run computes there anyway"
