"""What decides whether two honest parties get the same bits from the same work."""

import hashlib
import platform

import torch

from phalanx.config import StrictModel, canonical_json


class NumericClass(StrictModel):
    """Inside one class digests are compared; across classes, distances.

    Attention kernel, optimizer implementation and precision belong to it as well; they are in the
    plan, whose digest all parties of a run have in common.
    """

    torch: str
    device: str
    instructions: str
    threads: int
    ranks: int = 1
    """Processes that share every matrix product: they add up in another order than one does."""

    @property
    def label(self) -> str:
        """A short name for the class: equal labels, equal class."""
        return hashlib.sha256(canonical_json(self.model_dump(exclude_defaults=True))).hexdigest()[:16]


def settle_numerics(threads: int) -> None:
    """Make this process compute the same bits each time; owner and workers both call it once at the start.

    Args:
        threads: Threads of tensor kernels; the order in which they add up belongs to the numeric class.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # every byte is written before it is read; filling memory first would only cost time
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - mypy knows no such member


def local_numeric_class(device: str, ranks: int = 1) -> NumericClass:
    """Describe this process, or a group of so many ranks like it."""
    on_gpu = device.startswith("cuda")
    return NumericClass(
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} {_cpu_model()}",
        instructions="cuda" if on_gpu else torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        ranks=ranks,
    )


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    names = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(names.get(key, "?") for key in ("model name", "cpu family", "model", "stepping"))
