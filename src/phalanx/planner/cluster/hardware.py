"""Devices and clusters as a cluster file describes them."""

from typing import Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.planner.cluster.links import Link
from phalanx.planner.cluster.machine import THIRDS, Exchange, Shares
from phalanx.planner.model.recipe import Precision

GIB = 1024**3
TERA = 1e12


class Citation(StrictModel):
    """The source of figures.

    Attributes:
        date: Date of writing or reading, as year-month-day or a part of it.
    """

    title: str
    url: str
    date: str


class HourlyPrice(StrictModel):
    """The price of an hour of one device in US dollars; a quoted range, or twice the same figure."""

    low: float = Field(ge=0)
    high: float = Field(ge=0)
    source: Citation


class Device(StrictModel):
    """One kind of GPU, or of other rank.

    Attributes:
        memory_gib: Memory that a rank can use.
        bandwidth_gb_per_s: Memory bandwidth in 1e9 bytes.
        fp32_tflops: Peak of dense fp32 products.
        fp16_tflops: The same in fp16 with fp32 sums; left out where it is not known.
        bf16_tflops: The same in bf16; left out where the device has none.
        power_w: Power of the board under load, by its maker's statement.
        price: Left out where none is known.
    """

    title: str
    memory_gib: float = Field(gt=0)
    bandwidth_gb_per_s: float | None = Field(default=None, gt=0)
    fp32_tflops: float | None = Field(default=None, gt=0)
    fp16_tflops: float | None = Field(default=None, gt=0)
    bf16_tflops: float | None = Field(default=None, gt=0)
    power_w: float | None = Field(default=None, gt=0)
    price: HourlyPrice | None = None
    sources: tuple[Citation, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * GIB

    def peak_flops(self, precision: Precision) -> float | None:
        """Return the peak for products in a precision, in operations a second; None when it is not known."""
        name = {"fp32": "fp32", "fp16": "fp16"}.get(precision, "bf16")
        tera: float | None = getattr(self, f"{name}_tflops")
        return None if tera is None else tera * TERA


class Pool(StrictModel):
    """Equal devices of a cluster."""

    device: str
    """Name of one of the shipped devices, or of one in the cluster file's own ``[devices]``."""
    count: int = Field(ge=1)


class Failures(StrictModel):
    """The rate of failures, and the cost of each."""

    device_mtbf_h: float = Field(gt=0)
    """Mean hours between two failures of one device and what belongs to it."""
    save_s: float = Field(default=30.0, ge=0)
    """Return the seconds that a checkpoint stops the work."""
    restart_s: float = Field(default=300.0, ge=0)
    """From a failure until work goes on."""


class ProjectCosts(StrictModel):
    """What a training costs beside its own device hours; nobody knows these figures but who pays them."""

    failed_runs: float = Field(default=0.0, ge=0)
    """Device hours of runs that are thrown away, over those of the run that is kept."""
    people: float = Field(default=0.0, ge=0)
    """People who work on the training while it runs, failed runs included."""
    person_usd_per_year: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check_people(self) -> Self:
        if bool(self.people) != bool(self.person_usd_per_year):
            raise ValueError("people and person_usd_per_year: found one without the other; give both or neither")
        return self


class Cluster(StrictModel):
    """The cluster that a plan is made for.

    Attributes:
        pools: Its devices; several pools make it a heterogeneous one.
        per_node: Devices that the inner link joins.
        inside: Link between devices of one node: a preset, or latency and bandwidth.
        sealed: The link between nodes is encrypted, one message after the other, at the rate of `sealed_bandwidth`.
        efficiency: Share of the peak that the matrix products of a rank reach; an assumption unless it was measured.
        usable_memory: Share of a device's memory that tensors may take; the rest is for kernels and fragments.
        head_efficiency: Share of the peak that the head and the loss reach; left out, as `efficiency`.
        first_s: Seconds that a microbatch costs in the first stage beside its blocks, whatever its size.
        last_s: The same in the last stage.
        microbatch_s: Seconds that a microbatch costs in each stage of a pipeline beside its computation: launches,
            messages.
        block_s: Seconds that a microbatch costs in each block, forward and backward, whatever its size.
        shares: Shares of a block's seconds: its forward pass, the backward pass to its inputs, and the gradients of its
            weights.
        number_s: Seconds that one number of the residual stream costs in a block beside the products, forward and
            backward: norms and sums.
        shared_block_s: Seconds that sharing a block's gradients or parameters (ZeRO 2 and 3) costs each microbatch,
            whatever its size: calls, and messages one by one.
        overlap: Exchanges between ranks go on beside computation. False where the cores that compute also carry the
            bytes.
        cores: CPU cores of a node that its ranks share when they are more; left out, each has a device of its own.
        exchanges: Links of exchanges that were measured in the midst of computation, on ranks of one node.
        islands: Link between islands of copies that train apart; left out, it is that between nodes, or inside one.
        device_is_host: Devices are cores of the host: offloaded tensors lie in the same memory as before.
        host_gb_per_s: Bandwidth between a device and its host's memory, for offloading.
        power_overhead: Energy of the whole site over that of the devices.
        failures: Left out where they are not known: goodput is then null.
        costs: Failed runs and people, for the cost of the whole project; left out, it is null.
        devices: Kinds of devices that are not shipped.
    """

    title: str = ""
    pools: tuple[Pool, ...] = Field(min_length=1)
    per_node: int = Field(default=8, ge=1)
    inside: str | Link
    between: str | Link
    sealed: bool = False
    efficiency: float = Field(default=0.5, gt=0, le=1)
    usable_memory: float = Field(default=0.92, gt=0, le=1)
    head_efficiency: float | None = Field(default=None, gt=0, le=1)
    first_s: float = Field(default=0.0, ge=0)
    last_s: float = Field(default=0.0, ge=0)
    microbatch_s: float = Field(default=0.0, ge=0)
    block_s: float = Field(default=0.0, ge=0)
    shares: Shares = THIRDS
    number_s: float = Field(default=0.0, ge=0)
    shared_block_s: float = Field(default=0.0, ge=0)
    overlap: bool = True
    cores: int | None = Field(default=None, ge=1)
    exchanges: dict[Exchange, Link] = Field(default_factory=dict)
    islands: str | Link | None = None
    device_is_host: bool = False
    host_gb_per_s: float | None = Field(default=None, gt=0)
    power_overhead: float = Field(default=1.0, ge=1)
    failures: Failures | None = None
    costs: ProjectCosts | None = None
    devices: dict[str, Device] = Field(default_factory=dict)
    sources: tuple[Citation, ...] = ()

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        names = [pool.device for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: found {names}; give each device once, with its count")
        if min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError(f"shares: found {list(self.shares)}; give three numbers from 0 that add up to 1")
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.count for pool in self.pools)
