"""The section ``[federated]`` of a run file, and what other sections do not go together with it."""

from collections.abc import Iterator
from typing import Any

from phalanx.errors import ConfigError
from phalanx.federated.config import FederatedConfig

_FEWEST_STAGES = 3
"""With one for a site's workers between the two of its owner."""


def section_of(run: Any) -> FederatedConfig:
    """The section ``[federated]`` of a run that has one.

    Raises:
        ConfigError: It has none.
    """
    if not isinstance(run.federated, FederatedConfig):
        raise ConfigError("federated: the run file has no such section")
    return run.federated


def federated_fault(run: Any) -> str | None:
    """Describe the fault of a federated run; None where it is valid, or no such run."""
    return None if run.federated is None else next(_faults(run, run.federated), None)


def _of_whole_steps(section: Any, parties: str, part: str) -> Iterator[str]:
    """What sites have not that train by several parties.

    Args:
        section: Its ``[federated]``.
        parties: Those that train, for a sentence.
    """
    if section.algorithm.kind in ("fedprox", "scaffold"):
        yield (
            f'federated.algorithm.kind = "{section.algorithm.kind}" corrects each gradient of a site, and {parties} '
            f"take whole steps; take another kind, or remove {part}"
        )
    if section.exchange == "frozen_a":
        yield (
            f'federated.exchange = "frozen_a" trains one factor of each adapter, and {parties} train both; '
            f'take "factors" or "product", or remove {part}'
        )
    if section.personal:
        yield f"federated.personal: {parties} send all that they train; leave it out, or remove {part}"


def _of_ranks(run: Any) -> Iterator[str]:
    """What sites that are ranks of ``[parallel]`` have not besides."""
    if run.parallel.outer is not None or run.parallel.most_dp > run.parallel.dp:
        yield (
            "parallel.outer and parallel.max_dp: a site's ranks are as many in each round, with one model; leave them "
            "out beside [federated]"
        )


def _faults(run: Any, section: Any) -> Iterator[str]:
    if run.parallel is not None:
        yield from _of_whole_steps(section, "ranks of [parallel]", "[parallel]")
        yield from _of_ranks(run)
    if run.has_site_stages:
        yield from _of_whole_steps(section, "stages of [pipeline]", "[pipeline]")
        if run.pipeline.stages < _FEWEST_STAGES:
            yield (
                f"pipeline.stages = {run.pipeline.stages} beside [federated]: the owner of a site's pipeline has the "
                f"first and the last one, and workers need one between them; make it {_FEWEST_STAGES} or more"
            )
    elif "guard" in run.model_fields_set:
        yield "[guard] beside [federated] is of the pipeline that each site owns; add [pipeline], or remove [guard]"
    is_lora = run.model.adapter is not None and run.model.adapter.kind == "lora"
    own_files = None if run.data.labelled is None else run.data.labelled.own
    if section.algorithm.kind == "scaffold" and (run.optimizer.kind != "sgd" or run.optimizer.momentum):
        yield (
            'federated.algorithm.kind = "scaffold" corrects plain gradients; set optimizer.kind = "sgd" and '
            "optimizer.momentum = 0.0"
        )
    if section.exchange != "factors" and not is_lora:
        yield (
            f'federated.exchange = "{section.exchange}" is about the two factors of LoRA; give model.adapter the kind '
            '"lora", or leave it out'
        )
    elif section.exchange != "factors" and run.model.adapter.dora:
        yield (
            f'federated.exchange = "{section.exchange}" averages what adapters add exactly, and the sizes that DoRA '
            "learns beside its factors have no such mean; set model.adapter.dora = false, or leave exchange out"
        )
    if own_files is not None and len(own_files.train) != len(section.sites):
        yield (
            f"data.labelled.task names files of {len(own_files.train)} clients, and federated.sites has "
            f"{len(section.sites)} names; give each site its own, in their order"
        )
    if section.privacy is not None and run.data.tokenizer.kind == "bpe":
        yield (
            'federated.privacy has no data.tokenizer.kind = "bpe": a vocabulary that is trained on the text of sites '
            'tells of it without noise; take "model", or "file" with one of public text'
        )
