"""Algorithms of federated rounds: one file each, and the one table of them."""

from phalanx.federated.algorithms.algorithm import (
    Algorithm as Algorithm,
    LocalRule as LocalRule,
    Named as Named,
    PlainRule as PlainRule,
)
from phalanx.federated.algorithms.algorithm import AdamStep
from phalanx.federated.algorithms.algorithm import MeanStep
from phalanx.federated.algorithms.algorithm import MomentumStep
from phalanx.federated.algorithms.algorithm import staleness_weight as staleness_weight
from phalanx.federated.algorithms.algorithm import ProximalRule
from phalanx.federated.algorithms.algorithm import (
    CONTROL as CONTROL,
    ControlRule as ControlRule,
    next_control as next_control,
)

ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": Algorithm(MeanStep, PlainRule, "McMahan et al. 2017"),
    "fedavgm": Algorithm(MomentumStep, PlainRule, "Hsu et al. 2019"),
    "fedadam": Algorithm(AdamStep, PlainRule, "Reddi et al. 2021"),
    "fedprox": Algorithm(MeanStep, ProximalRule, "Li et al. 2020"),
    "scaffold": Algorithm(MeanStep, ControlRule, "Karimireddy et al. 2020"),
    "fedbuff": Algorithm(MeanStep, PlainRule, "Nguyen et al. 2022"),
}
