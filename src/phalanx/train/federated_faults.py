"""What sections of a run file with ``[federated]`` do not go together."""

from typing import Any


def federated_fault(run: Any) -> str | None:
    """Say what is wrong with a federated run; None where all is well, or where it is none."""
    section = run.federated
    if section is None:
        return None
    is_lora = run.model.adapter is not None and run.model.adapter.kind == "lora"
    own = None if run.data.labelled is None else run.data.labelled.own
    if section.algorithm.kind == "scaffold" and (run.optimizer.kind != "sgd" or run.optimizer.momentum):
        return (
            'federated.algorithm.kind = "scaffold" corrects plain gradients; set optimizer.kind = "sgd" and '
            "optimizer.momentum = 0.0"
        )
    if section.exchange != "factors" and not is_lora:
        return (
            f'federated.exchange = "{section.exchange}" is about the two factors of LoRA; give model.adapter the kind '
            '"lora", or leave it out'
        )
    if section.exchange != "factors" and run.model.adapter.dora:
        return (
            f'federated.exchange = "{section.exchange}" averages what adapters add exactly, and the sizes that DoRA '
            "learns beside its factors have no such mean; set model.adapter.dora = false, or leave exchange out"
        )
    if own is not None and len(own.train) != len(section.sites):
        return (
            f"data.labelled.task names files of {len(own.train)} clients, and federated.sites has {len(section.sites)} "
            "names; give each site its own, in their order"
        )
    return None
