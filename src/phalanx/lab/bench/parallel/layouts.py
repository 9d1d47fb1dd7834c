"""The layouts that `bench parallel` measures, in shifts, and the peers that come nearest to them."""

from dataclasses import dataclass
from typing import Any

from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.parallel import ParallelConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import DomainRun, PipelineRun

NO_TENSOR_PEER = "no peer: transformers has no tensor parallel plan for GPT-2, and torchtitan needs CUDA"
NO_CONTEXT_PEER = "no peer: torch's context parallelism has no CPU kernel, and torchtitan needs CUDA"
NO_COMBINED_PEER = "no peer: torchtitan, which combines these, needs CUDA"

_WIDTH, _HEADS = 192, 8


@dataclass(frozen=True)
class InterleavedLayouts:
    """Arms that live side by side and take turns; a plain single process is always among them.

    Attributes:
        layouts: Layouts of the engine, as keys of ``[parallel]``.
        peers: Arms of `phalanx.lab.bench.parallel.arms.PEERS` that do the same.
        lossy: The gradients are rounded on purpose, so losses differ.
        memory: Only the memory of these arms is measured, one after the other.
    """

    layouts: tuple[dict[str, Any], ...]
    peers: tuple[str, ...] = ()
    no_peer: str | None = None
    lossy: bool = False
    memory: bool = False
    name: str = ""

    def parallel_configs(self) -> list[ParallelConfig]:
        """The layouts as run files have them."""
        return [ParallelConfig.model_validate(keys) for keys in self.layouts]


SHIFTS: tuple[InterleavedLayouts, ...] = (
    InterleavedLayouts(({},), name="one rank"),
    InterleavedLayouts(({"dp": 2},), ("torch DDP", "accelerate DDP"), name="copies"),
    InterleavedLayouts(
        ({"dp": 2, "zero": 1},), ("torch DDP + ZeroRedundancyOptimizer", "DeepSpeed ZeRO 1"), name="optimizer shared"
    ),
    InterleavedLayouts(
        ({"dp": 2, "zero": 2},),
        (
            "torch FSDP2, parameters kept whole",
            "accelerate FSDP2, parameters kept whole",
            "DeepSpeed ZeRO 2",
        ),
        name="gradients shared",
    ),
    InterleavedLayouts(
        ({"dp": 2, "zero": 3},), ("torch FSDP2", "accelerate FSDP2", "DeepSpeed ZeRO 3"), name="parameters shared"
    ),
    InterleavedLayouts(({"tp": 2}, {"tp": 2, "sequence_parallel": True}), no_peer=NO_TENSOR_PEER, name="tensor"),
    InterleavedLayouts(
        ({"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "gpipe"}),
        ("torch pipelining, 1F1B",),
        name="pipeline",
    ),
    InterleavedLayouts(
        tuple({"pp": 2, "schedule": name} for name in ("interleaved", "zero-bubble", "interleaved-zero-bubble")),
        ("torch pipelining, 1F1B",),
        name="pipeline with less bubble",
    ),
    InterleavedLayouts(
        ({"cp": 2}, {"cp": 2, "context": "ring"}, {"cp": 2, "zero": 3}), no_peer=NO_CONTEXT_PEER, name="context"
    ),
    InterleavedLayouts(
        ({"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}), no_peer=NO_COMBINED_PEER, name="two axes"
    ),
    InterleavedLayouts(
        ({"dp": 2, "pp": 2, "zero": 3}, {"dp": 2, "tp": 2, "zero": 3}, {"dp": 2, "tp": 2, "pp": 2}),
        no_peer=NO_COMBINED_PEER,
        name="with ZeRO, and three axes",
    ),
    InterleavedLayouts(
        ({"dp": 2, "gradient_compression": "bf16"}, {"dp": 2, "gradient_compression": "powersgd"}),
        ("torch DDP",),
        lossy=True,
        name="compressed gradients",
    ),
)


def small_run() -> PipelineRun:
    """The model of the layouts: GPT-2 with heads that 2 and 4 ranks can share, 16 sequences of 128 tokens a step."""
    run = scratch_run()
    architecture = {**(run.model.architecture or {}), "n_embd": _WIDTH, "n_head": _HEADS}
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"architecture": architecture}),
            "train": run.train.model_copy(update={"steps": 20, "batch_size": 16, "microbatches": 4}),
            "optimizer": run.optimizer.model_copy(update={"warmup_steps": 2}),
            "checkpoint": run.checkpoint.model_copy(update={"every": 0}),
            "pipeline": PipelineConfig(),
        }
    )


def with_layout(
    run: PipelineRun | DomainRun, config: ParallelConfig, deepspeed: DeepSpeedConfig | None = None
) -> DomainRun:
    """The same run by the ranks of a layout."""
    sections = {name: section for name, section in run.written.items() if name in DomainRun.model_fields}
    joined = {} if deepspeed is None else {"deepspeed": deepspeed}
    return DomainRun(**sections | {"parallel": config} | joined)


def layout_name(config: ParallelConfig) -> str:
    """A layout in words."""
    name_parts = [str(config.planned_layout)]
    name_parts += ["sequence_parallel"] if config.sequence_parallel else []
    name_parts += [config.gradient_compression] if config.gradient_compression != "none" else []
    name_parts += ["offload"] if config.offload else []
    return " ".join(name_parts)
