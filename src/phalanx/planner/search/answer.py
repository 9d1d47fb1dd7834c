"""The planner's answer to a question, also as JSON."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import device_of, link_of, link_sides
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.estimate import Estimate, machine_of
from phalanx.planner.cost.mixed import StageDevices, mixed_timeline
from phalanx.planner.cost.schedule import Timeline
from phalanx.planner.cost.step import play_timeline
from phalanx.planner.model.compute import training_flops
from phalanx.planner.search.question import Question
from phalanx.planner.search.rank import Ranking, RefusedLayout, merge_rankings, rank_layouts
from phalanx.planner.validity import nearest_valid_layout

_SHOWN_MICROBATCHES = 16
_SHOWN_CAUSES = 6
_NUMBER = re.compile(r"\d[\d,.]*")


@dataclass(frozen=True)
class PlanAnswer:
    """The planner's answer about every layout."""

    question: Question
    ranking: Ranking

    @property
    def best_layout(self) -> Estimate | None:
        """The best layout; None when none can be used."""
        return self.ranking.valid[0] if self.ranking.valid else None

    def require_best(self) -> Estimate:
        """Return the best layout.

        Raises:
            ConfigError: None can be used; the message has every cause, with the number of layouts that it rules out.
        """
        if self.best_layout is not None:
            return self.best_layout
        question = self.question
        reasons = [refused.reason for refused in self.ranking.refused]
        asked = question.fixed
        if asked is not None:
            other = nearest_valid_layout(asked, question.shape, question.recipe)
            hint = f"; the nearest that can work is {other}" if other is not None and other != asked else ""
            raise ConfigError(f"plan: {asked}: {reasons[0]}{hint}").with_facts(code="PHX-C020")
        raise ConfigError(
            f"plan: none of {len(reasons):,} layouts of {_any_of(question.counts)} devices can be used:\n"
            + ("\n".join(refusal_causes(self.ranking.refused, by_nearness=True)) or "  there are no devices")
        ).with_facts(code="PHX-C020")

    def best_pipeline(self) -> tuple[Estimate, Timeline] | None:
        """Return the best layout that has a pipeline, with a step of it played through; None without one."""
        question = self.question
        for estimated in self.ranking.valid:
            if estimated.layout.pp == 1:
                continue
            if estimated.devices is not None and estimated.layers is not None:
                placed = StageDevices(estimated.devices, estimated.layers)
                shown = min(estimated.recipe.microbatches, _SHOWN_MICROBATCHES)
                return estimated, mixed_timeline(
                    question.shape, estimated.layout, estimated.recipe, question.cluster, placed, shown
                )
            device = device_of(question.cluster, question.cluster.pools[0].device)
            machine = machine_of(question.cluster, device, estimated.recipe.precision)
            return estimated, play_timeline(
                question.shape, estimated.layout, estimated.recipe, machine, _SHOWN_MICROBATCHES
            )
        return None

    def as_json(self) -> dict[str, Any]:
        """Return question, assumptions and answer as one JSON object."""
        question = self.question
        return {
            "name": "plan",
            "model": {
                "name": question.model,
                **asdict(question.shape),
                "parameters": question.shape.num_parameters,
                "flops_per_token": training_flops(question.shape, question.recipe),
            },
            "recipe": asdict(question.recipe),
            "devices": list(question.counts),
            "tokens": question.tokens,
            "guard": None if question.guard is None else asdict(question.guard),
            "by": question.by,
            "assumptions": list_assumptions(question.cluster),
            "rows": [estimated.estimate_row() for estimated in self.ranking.valid],
            "refused": [{"layout": str(refused.layout), "reason": refused.reason} for refused in self.ranking.refused],
        }


def answer_question(question: Question) -> PlanAnswer:
    """Answer a question."""
    num_devices = question.cluster.num_devices
    for number in question.counts:
        if not 1 <= number <= num_devices:
            raise ConfigError(f"--gpus {number}: the cluster has {num_devices} devices; give 1 to {num_devices}")
    rankings = [
        rank_layouts(
            question.shape,
            question.recipe,
            question.cluster,
            number,
            tokens=question.tokens,
            guard=question.guard,
            by=question.by,
            fixed=question.fixed,
            own=question.own,
        )
        for number in dict.fromkeys(question.counts)
    ]
    return PlanAnswer(question, merge_rankings(rankings, question.by))


def refusal_causes(refused: Sequence[RefusedLayout], *, by_nearness: bool = False) -> list[str]:
    """Return a line for each cause: how many layouts it rules out, and the one of them that is nearest to fit.

    Reasons that differ in their numbers alone have one cause.

    Args:
        by_nearness: Begin with the causes that lack least memory, and go on with those that are no matter of memory;
            else the most frequent cause comes first.
    """
    groups: dict[str, list[RefusedLayout]] = {}
    for layout in refused:
        groups.setdefault(_NUMBER.sub("N", layout.reason), []).append(layout)
    nearest = {cause: min(group, key=_missing_share) for cause, group in groups.items()}
    ordered = sorted(groups, key=lambda cause: len(groups[cause]), reverse=True)
    if by_nearness:
        ordered.sort(key=lambda cause: _missing_share(nearest[cause]))
    lines = [
        f"  {len(groups[cause]):,}: {_describe_missing(shown)}{shown.reason} ({shown.layout})"
        for cause, shown in ((cause, nearest[cause]) for cause in ordered[:_SHOWN_CAUSES])
    ]
    num_others = sum(len(groups[cause]) for cause in ordered[_SHOWN_CAUSES:])
    return [*lines, f"  {num_others:,}: other causes"] if num_others else lines


def _missing_share(refused: RefusedLayout) -> float:
    return math.inf if refused.excess is None else refused.excess


def _describe_missing(refused: RefusedLayout) -> str:
    return "" if refused.excess is None else f"{refused.excess:.3g} times the memory: "


def _any_of(counts: tuple[int, ...]) -> str:
    return " or ".join(str(number) for number in counts)


def list_assumptions(cluster: Cluster) -> dict[str, Any]:
    """Return what figures of a cluster rest on: devices, links, shares, and where each comes from."""
    devices = {pool.device: device_of(cluster, pool.device) for pool in cluster.pools}
    links = {side: link_of(cluster, side).model_dump() for side in link_sides(cluster)}
    return {
        "cluster": cluster.title,
        "pools": {pool.device: pool.count for pool in cluster.pools},
        "per_node": cluster.per_node,
        "sealed": cluster.sealed,
        "efficiency": cluster.efficiency,
        "usable_memory": cluster.usable_memory,
        "microbatch_s": cluster.microbatch_s,
        "power_overhead": cluster.power_overhead,
        "costs": None if cluster.costs is None else cluster.costs.model_dump(),
        "failures": None if cluster.failures is None else cluster.failures.model_dump(),
        "links": links,
        "devices": {name: device.model_dump(mode="json") for name, device in devices.items()},
        "sources": [source.model_dump() for source in cluster.sources],
    }
