"""The parties of a split, as a parties file describes them: a client, an enclave, the link between them."""

from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import known_links
from phalanx.planner.cluster.hardware import GIB, TERA, Cluster
from phalanx.planner.cluster.links import Link
from phalanx.planner.guard.finding import sealed_bandwidth

Mode = Literal["sealed", "plaintext"]


class PartyMachine(StrictModel):
    """One side of the cut.

    Attributes:
        memory_gib: Memory that it may use; of an enclave that which is encrypted.
        tflops: Operations a second that its matrix products really reach, in 1e12.
        usable_memory: Share of the memory that tensors may take.
    """

    memory_gib: float = Field(gt=0)
    tflops: float = Field(gt=0)
    usable_memory: float = Field(default=0.92, gt=0, le=1)

    @property
    def usable_bytes(self) -> float:
        """Bytes for tensors."""
        return self.memory_gib * GIB * self.usable_memory

    @property
    def flops_per_s(self) -> float:
        """Operations a second."""
        return self.tflops * TERA


class Parties(StrictModel):
    """The parties that a cut is proposed for.

    Attributes:
        mode: Transport of tensors: ``sealed``, or ``plaintext``, where the host of the back part sees them.
        client: Runs the frozen front; one of several equal ones.
        enclave: Runs the back, with adapters and head.
        wire: Precision in which activations cross.
        clients: Number of clients that share the sequences of a step.
        link: Between a client and the enclave's machine: a known link, or latency and bandwidth.
        max_leak: Share of tokens beyond chance that the host may recover.
        adapter_rank: Rank of LoRA on queries and values in the back.
        min_back: Minimum number of blocks in the enclave: other blocks have no adapter.
    """

    title: str = ""
    mode: Mode = "sealed"
    client: PartyMachine
    enclave: PartyMachine
    wire: Literal["fp32", "bf16"] = "fp32"
    clients: int = Field(default=1, ge=1)
    link: str | Link = "wan"
    max_leak: float = Field(default=0.01, ge=0, le=1)
    adapter_rank: int = Field(default=8, ge=1)
    min_back: int = Field(default=1, ge=1)

    def link_as_used(self, where: str = "parties") -> Link:
        """Return the link as tensors see it: where they are sealed, that takes its time."""
        link = self.link
        if isinstance(link, str):
            if link not in known_links():
                raise ConfigError(f"{where}: link: unknown link {link!r}; choices: {', '.join(sorted(known_links()))}")
            link = known_links()[link]
        if self.mode == "plaintext":
            return link
        return Link(latency_s=link.latency_s, bytes_per_s=sealed_bandwidth(link.bytes_per_s))


def parties_here(machine: Cluster) -> Parties:
    """Return client and enclave as two ranks of one machine, loopback between them."""
    device = machine.devices[machine.pools[0].device]
    side = PartyMachine(memory_gib=device.memory_gib, tflops=(device.fp32_tflops or 0.0) * machine.efficiency)
    return Parties(title=machine.title, client=side, enclave=side, link="loopback")
