"""What DeepSpeed's ranks are compared with one process on; imports no torch."""

from dataclasses import dataclass, field
from typing import Any, Literal

STEPS = 20
DIRECTORY = "DIRECTORY"
"""Stands for a folder of the test's own."""


@dataclass(frozen=True)
class ZeroCase:
    """One section on one model; `saves` and `loads` name a file of its state after half the steps."""

    section: dict[str, Any]
    dp: int = 2
    family: str = "gpt2"
    saves: str | None = None
    loads: str | None = None
    engine: Literal["deepspeed", "parallel"] = "deepspeed"
    precision: Literal["fp32", "bf16"] = "fp32"
    adapted: tuple[str, ...] | None = None
    recompute: str = "none"
    allowed: float = 1e-5
    files: tuple[str, ...] = field(default=())
    """Parts of names of files that must have been on disk during the last step."""

    @property
    def name(self) -> str:
        """What a test is called."""
        words = [self.engine, self.family, f"dp={self.dp}"]
        words += [f"{key}={value}" for key, value in self.section.items() if key != "directory"]
        words += [self.precision] if self.precision != "fp32" else []
        words += ["adapter"] if self.adapted is not None else []
        words += [self.recompute] if self.recompute != "none" else []
        words += [f"saves={self.saves}"] if self.saves else []
        words += [f"loads={self.loads}"] if self.loads else []
        return " ".join(words)

    @property
    def reference(self) -> str:
        """Which curve of one process it is compared with."""
        return " ".join([self.family, *(self.adapted or ()), "" if self.adapted is None else "adapter"])


def homes(optimizer: str, parameters: str, **more: Any) -> dict[str, Any]:
    """A section with ZeRO 3 that keeps things outside."""
    found = {"offload_optimizer": optimizer, "offload_parameters": parameters, **more}
    return found | ({"directory": DIRECTORY} if "nvme" in (optimizer, parameters) else {})


_SWAPPED = ("optimizer", "param.tensor.swp")
# shares of 1 MiB and more go to disk: the wide model's layers do, and every group of the optimizer's numbers
CASES = [
    ZeroCase({"zero": 1}),
    ZeroCase({"zero": 2}),
    ZeroCase({"zero": 3}),
    ZeroCase({"zero": 1, "offload_optimizer": "cpu"}, family="opt"),
    ZeroCase({"zero": 2, "offload_optimizer": "cpu"}, saves="host"),
    ZeroCase(homes("cpu", "none"), family="llama"),
    ZeroCase(homes("cpu", "cpu"), family="bloom"),
    ZeroCase(homes("nvme", "none"), family="wide", files=_SWAPPED[:1]),
    ZeroCase(homes("cpu", "nvme"), family="wide", files=_SWAPPED[1:]),
    ZeroCase(homes("nvme", "nvme"), family="wide", saves="disk", files=_SWAPPED),
    ZeroCase(homes("nvme", "nvme", update_at_once=400_000), dp=1, family="wide", files=_SWAPPED),
    ZeroCase(homes("nvme", "nvme"), family="wide", loads="disk", files=_SWAPPED),
    ZeroCase({"zero": 1}, family="wide", loads="disk"),
    ZeroCase({}, family="wide", engine="parallel", loads="disk"),
    ZeroCase({"zero": 3}, loads="host"),
    ZeroCase({"zero": 3}, dp=1, family="llama"),
    ZeroCase({"zero": 3}, family="opt", recompute="full"),
    ZeroCase({"zero": 3}, family="llama", adapted=("q_proj", "v_proj")),
    ZeroCase(homes("cpu", "cpu"), family="llama", precision="bf16", allowed=2e-2),
]
