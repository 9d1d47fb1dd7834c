"""One layout on one cluster: memory, time, energy, money, and every assumption beside them."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import device_of, link_of
from phalanx.planner.cluster.hardware import GIB, Cluster, Device, ProjectCosts
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.exchanging import Traffic, count_traffic
from phalanx.planner.cost.memory import RankMemory, worst_rank
from phalanx.planner.cost.step import StepTime, step_time
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.model.compute import DAY_S, HOUR_S, flops_utilization, training_flops
from phalanx.planner.model.recipe import Precision, Recipe
from phalanx.planner.model.shape import ModelShape


def device_to_cluster_mtbf(device_mtbf_s: float, num_devices: int) -> float:
    """Mean time between failures of a cluster that stops when any device does, in seconds."""
    return device_mtbf_s / num_devices


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints, by the higher order estimate. Source: Daly 2006, equation 37."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time in which work is done that lasts, for failures that come at random.

    Args:
        interval_s: Work between two checkpoints, in seconds.
        restart_s: Seconds from a failure until work goes on.
        mtbf_s: Mean time between failures of the whole cluster.

    Source: Daly 2006, equation 13: exponentially distributed failures, which strike while saving and restarting too.
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > math.log(1e300):
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


GIGA = 1e9
DAYS_A_YEAR = 365.25


@dataclass(frozen=True)
class TrainingTotals:
    """The totals of a whole training; None for what depends on a figure that is not known.

    Attributes:
        goodput: Share of the time in which lasting work is done; 1 where failures are not modelled.
        days: Days from the first step to the last.
        device_hours: Hours summed over all devices.
        energy_kwh: At the power that makers state, with the site's overhead; an upper bound.
        cost_usd: At the lowest and at the highest quoted price.
        people_usd: Pay of people while this run and the failed ones last.
        project_usd: Devices of this run and of failed ones, and people; at the lowest and at the highest quoted price.
    """

    tokens: float
    goodput: float
    days: float
    device_hours: float
    energy_kwh: float | None
    cost_usd: tuple[float, float] | None
    people_usd: float | None = None
    project_usd: tuple[float, float] | None = None


@dataclass(frozen=True)
class Estimate:
    """One layout with its figures.

    Attributes:
        limit: Bytes that a rank may use.
        mfu: Useful operations over the devices' peak.
        totals: Totals of the training; None when no number of tokens was given.
        layers: Layers of each stage where they are uneven; else None.
        devices: Device of each pipeline rank where they differ; else None.
        sent: Bytes that a rank sends in a step to those with other sequences; None in a mixed pool.
    """

    layout: Layout
    recipe: Recipe
    memory: RankMemory
    limit: float
    step: StepTime
    tokens_per_s: float
    mfu: float
    totals: TrainingTotals | None
    layers: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    sent: Traffic | None = None

    def estimate_row(self) -> dict[str, Any]:
        """Return its figures as one flat JSON object; bytes are in GiB."""
        totals = self.totals
        return {
            "layout": str(self.layout),
            **self.layout.parallel_section(),
            "replicas": self.layout.replicas,
            "islands": self.layout.islands,
            "microbatches": self.recipe.microbatches,
            "checkpointing": self.recipe.checkpointing,
            "sequence_parallel": self.recipe.sequence_parallel,
            **{f"{name}_gib": size / GIB for name, size in self.memory.parts_by_name().items()},
            "memory_gib": self.memory.total_bytes / GIB,
            "host_gib": self.memory.host / GIB,
            **{f"{name}_s": seconds for name, seconds in self.step.parts_by_name().items()},
            "hidden_s": self.step.hidden,
            **{f"sent_{part.name}_bytes": self.sent and getattr(self.sent, part.name) for part in fields(Traffic)},
            "step_s": self.step.total_seconds,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "goodput": totals.goodput if totals else None,
            "days": totals.days if totals else None,
            "device_hours": totals.device_hours if totals else None,
            "energy_kwh": totals.energy_kwh if totals else None,
            "cost_usd_low": totals.cost_usd[0] if totals and totals.cost_usd else None,
            "cost_usd_high": totals.cost_usd[1] if totals and totals.cost_usd else None,
            "people_usd": totals.people_usd if totals else None,
            "project_usd_low": totals.project_usd[0] if totals and totals.project_usd else None,
            "project_usd_high": totals.project_usd[1] if totals and totals.project_usd else None,
            "layers": list(self.layers) if self.layers else None,
            "devices": list(self.devices) if self.devices else None,
        }


def estimate_layout(
    shape: ModelShape,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    *,
    tokens: float | None = None,
    guard: Verification | None = None,
    exact: bool = True,
) -> Estimate:
    """Estimate one valid layout on the first pool of a cluster.

    Args:
        layout: Layout that `describe_refusal` accepts.
        tokens: Tokens of the training; None leaves out days, energy and cost.
        guard: Verification between trust domains; None inside one.
        exact: Play the pipeline through instead of taking the formula for equal stages.
    """
    recipe = effective_recipe(recipe, cluster)
    device = device_of(cluster, cluster.pools[0].device)
    machine = machine_of(cluster, device, recipe.precision)
    step = step_time(shape, layout, recipe, machine, guard, exact=exact)
    per_s = recipe.tokens_per_step / step.total_seconds
    peak = machine.flops_per_s / cluster.efficiency
    return Estimate(
        layout=layout,
        recipe=recipe,
        memory=worst_rank(shape, layout, recipe),
        limit=usable_bytes(cluster),
        step=step,
        tokens_per_s=per_s,
        mfu=flops_utilization(per_s, training_flops(shape, recipe), layout.num_ranks, peak),
        totals=None if tokens is None else totals_of(tokens, per_s, cluster, [(device, layout.num_ranks)]),
        sent=count_traffic(shape, layout, recipe),
    )


def effective_recipe(recipe: Recipe, cluster: Cluster) -> Recipe:
    """Return a recipe as a cluster carries it out: where the device is the host, offloading moves nothing."""
    return replace(recipe, offload="none") if cluster.device_is_host else recipe


def usable_bytes(cluster: Cluster) -> float:
    """Return the bytes that tensors may take on a device of a cluster's first pool."""
    return device_of(cluster, cluster.pools[0].device).memory_bytes * cluster.usable_memory


def describe_excess(memory: RankMemory, limit: float) -> str | None:
    """Say how much is missing and what takes most, or None where it fits."""
    if memory.total_bytes <= limit:
        return None
    name, size = max(memory.parts_by_name().items(), key=lambda item: item[1])
    return (
        f"needs {memory.total_bytes / GIB:.4g} GiB a rank, {limit / GIB:.4g} GiB are usable; "
        f"most is {name}, {size / GIB:.4g} GiB"
    )


def machine_of(cluster: Cluster, device: Device, precision: Precision) -> Machine:
    """Return the machine of a rank on one device of a cluster."""
    peak = device.peak_flops(precision)
    if peak is None:
        others = [name for name in ("fp32", "fp16", "bf16") if getattr(device, f"{name}_tflops") is not None]
        raise ConfigError(
            f"cluster: {device.title}: no peak is known for {precision}; take one of {', '.join(others)} "
            "or add the figure"
        )
    return Machine(
        flops_per_s=peak * cluster.efficiency,
        memory_bytes_per_s=None if device.bandwidth_gb_per_s is None else device.bandwidth_gb_per_s * GIGA,
        per_node=cluster.per_node,
        inside=link_of(cluster, "inside"),
        between=link_of(cluster, "between"),
        microbatch_s=cluster.microbatch_s,
        host_bytes_per_s=None if cluster.host_gb_per_s is None else cluster.host_gb_per_s * GIGA,
        head_flops_per_s=None if cluster.head_efficiency is None else peak * cluster.head_efficiency,
        first_s=cluster.first_s,
        last_s=cluster.last_s,
        block_s=cluster.block_s,
        number_s=cluster.number_s,
        shares=cluster.shares,
        shared_block_s=cluster.shared_block_s,
        overlap=cluster.overlap,
        cores=cluster.cores,
        exchanges=cluster.exchanges,
        island_link=None if cluster.islands is None else link_of(cluster, "islands"),
    )


def totals_of(tokens: float, tokens_per_s: float, cluster: Cluster, used: list[tuple[Device, int]]) -> TrainingTotals:
    """Return time, energy and cost of a training.

    Args:
        tokens_per_s: Rate of all ranks while nothing fails.
        cluster: Failures and the site's overhead.
    """
    number = sum(count for _, count in used)
    share = 1.0
    if cluster.failures is not None:
        mtbf = device_to_cluster_mtbf(cluster.failures.device_mtbf_h * HOUR_S, number)
        interval = daly_interval(cluster.failures.save_s, mtbf)
        share = goodput_share(interval, cluster.failures.save_s, cluster.failures.restart_s, mtbf)
    if share <= 0:
        raise ConfigError(
            f"cluster: failures: {number} devices fail before a checkpoint is written; nothing would last"
        )
    seconds = tokens / tokens_per_s / share
    hours = seconds / HOUR_S
    energy = cost = None
    if all(device.power_w is not None for device, _ in used):
        energy = sum((device.power_w or 0.0) * count for device, count in used) / 1e3 * hours * cluster.power_overhead
    if all(device.price is not None for device, _ in used):
        prices = [(device.price, count) for device, count in used if device.price is not None]
        cost = (
            sum(price.low * count for price, count in prices) * hours,
            sum(price.high * count for price, count in prices) * hours,
        )
    totals = TrainingTotals(tokens, share, seconds / DAY_S, hours * number, energy, cost)
    return totals if cluster.costs is None else _with_project(totals, cluster.costs)


def _with_project(totals: TrainingTotals, costs: ProjectCosts) -> TrainingTotals:
    """Add failed runs, whose devices are paid too, and people, who are paid while any of them runs."""
    runs = 1 + costs.failed_runs
    people = costs.people * costs.person_usd_per_year * totals.days * runs / DAYS_A_YEAR
    project = totals.cost_usd and (totals.cost_usd[0] * runs + people, totals.cost_usd[1] * runs + people)
    return replace(totals, people_usd=people, project_usd=project)
