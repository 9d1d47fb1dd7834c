"""The description of a numeric class: everything that decides whether two honest parties compute equal bits."""

import platform
from typing import Annotated

import torch
from pydantic import Field

from phalanx.config import StrictModel
from phalanx.pipeline.party_layout import PartyLayout

Word = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]
"""A short text that can be shown on a terminal as it is."""


class NumericClass(StrictModel):
    """A party's own description of what its bits depend on: for messages to people, and for nothing else.

    Which parties are of one class is measured (`kernel_fingerprint.py`). Attention kernel, optimizer and precision are
    in the plan, and all parties of a run have the plan's digest in common.
    """

    torch: Word
    device: Word
    instructions: Word
    threads: int = Field(ge=1, le=2**20)
    ranks: int = Field(default=1, ge=1, le=2**20)
    """Processes that share the work of a stage: they add up in another order than one does."""
    layout: Word = ""
    """How they share it."""

    def describe_difference(self, other: "NumericClass") -> str:
        """Describe in words where this description differs from the other; empty where they are equal."""
        mine, theirs = self.model_dump(), other.model_dump()
        return ", ".join(
            f"{name} {mine[name] or 'none'} instead of {theirs[name] or 'none'}"
            for name in mine
            if mine[name] != theirs[name]
        )


def settle_numerics(threads: int) -> None:
    """Make this process compute the same bits each time; owner and workers both call it once at the start.

    Args:
        threads: Threads of tensor kernels; the order in which they add up belongs to the numeric class.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # every byte is written before it is read; filling memory first would only cost time
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - mypy knows no such member


def local_numeric_class(device: str, layout: PartyLayout | None = None) -> NumericClass:
    """Describe this process, or a group of ranks like it."""
    on_gpu = device.startswith("cuda")
    return NumericClass(
        torch=_printable_ascii(torch.__version__),
        device=_printable_ascii(torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} {_cpu_model()}"),
        instructions="cuda" if on_gpu else torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        ranks=1 if layout is None else layout.num_ranks,
        layout="" if layout is None else layout.short_description,
    )


def _printable_ascii(text: str) -> str:
    return "".join(outgoing if " " <= outgoing <= "~" else "?" for outgoing in text)[:200]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(row.split(":", 1) for row in file.read().split("\n\n")[0].splitlines() if ":" in row)
    except OSError:
        return platform.processor()
    names = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(names.get(key, "?") for key in ("model name", "cpu family", "model", "stepping"))
