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
        raise ConfigError("federated: the section [federated] is missing")
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
            f'federated.algorithm.kind = "{section.algorithm.kind}" corrects each gradient of a site, but {parties} '
            f"make whole steps; choose another kind, or remove {part}"
        )
    if section.exchange == "frozen_a":
        yield (
            f'federated.exchange = "frozen_a" trains one factor of each adapter, but {parties} train both; set '
            f'"factors" or "product", or remove {part}'
        )
    if section.personal:
        yield f"federated.personal: {parties} send all trained weights; remove it, or remove {part}"


def _of_ranks(run: Any) -> Iterator[str]:
    """What sites that are ranks of ``[parallel]`` have not besides."""
    if run.parallel.outer is not None or run.parallel.most_dp > run.parallel.dp:
        yield (
            "parallel.outer and parallel.max_dp: a site has a fixed number of ranks and one model; remove them "
            "with [federated]"
        )


def _faults(run: Any, section: Any) -> Iterator[str]:
    if run.parallel is not None:
        yield from _of_whole_steps(section, "ranks of [parallel]", "[parallel]")
        yield from _of_ranks(run)
    if run.has_site_stages:
        yield from _of_whole_steps(section, "stages of [pipeline]", "[pipeline]")
        if run.pipeline.stages < _FEWEST_STAGES:
            yield (
                f"pipeline.stages = {run.pipeline.stages} with [federated]: the owner of a site's pipeline has the "
                f"first and the last stage, and workers need one between them; set it to {_FEWEST_STAGES} or more"
            )
    elif "guard" in run.model_fields_set:
        yield "[guard] with [federated] guards the pipeline of each site; add [pipeline], or remove [guard]"
    is_lora = run.model.adapter is not None and run.model.adapter.kind == "lora"
    own_files = None if run.data.labelled is None else run.data.labelled.own
    if section.algorithm.kind == "scaffold" and (run.optimizer.kind != "sgd" or run.optimizer.momentum):
        yield (
            'federated.algorithm.kind = "scaffold" corrects plain gradients; set optimizer.kind = "sgd" and '
            "optimizer.momentum = 0.0"
        )
    if section.exchange != "factors" and not is_lora:
        yield (
            f'federated.exchange = "{section.exchange}" needs the two factors of LoRA; set model.adapter.kind = '
            '"lora", or remove it'
        )
    elif section.exchange != "factors" and run.model.adapter.dora:
        yield (
            f'federated.exchange = "{section.exchange}" averages the products of the factors exactly, but not '
            "DoRA's magnitudes; set model.adapter.dora = false, or remove exchange"
        )
    if own_files is not None and len(own_files.train) != len(section.sites):
        yield (
            f"data.labelled.task names files of {len(own_files.train)} clients, but federated.sites has "
            f"{len(section.sites)} names; give each site its own files, in the same order"
        )
    if section.privacy is not None and run.data.tokenizer.kind == "bpe":
        yield (
            'federated.privacy excludes data.tokenizer.kind = "bpe": a vocabulary trained on the sites\' text '
            'reveals it without noise; use "model", or "file" with one of public text'
        )
