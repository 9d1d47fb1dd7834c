"""A run of sites: each trains the model on its own data, in one process, by ranks, or by stages of a pipeline."""

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from phalanx.checkpoint import CheckpointConfig
from phalanx.config import RefusedKeyError
from phalanx.federated.config import FederatedConfig
from phalanx.models import LoraConfig
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.train.runs.base import Faults, PrivateBase
from phalanx.train.runs.domain import RankedBase
from phalanx.train.runs.pipeline import GuardedBase, PipelineRun
from phalanx.train.runs.row_privacy import LEARNED_AT_SITES
from phalanx.train.runs.support import ABSENT_SECTIONS, exclusion, missing_section

_MIN_SITE_STAGES = 3
"""With one for a site's workers between the two of its owner."""


class FederatedRun(PrivateBase):
    """A run of ``[federated]`` whose sites train in one process each."""

    engine: ClassVar[str] = "federated"
    federated: FederatedConfig

    @classmethod
    def _section_fault(cls, names: Collection[str]) -> RefusedKeyError | None:
        if "guard" in names:
            return missing_section(
                "pipeline",
                "[guard] beside [federated] is of the pipeline that each site owns",
                "add [pipeline], or remove [guard]",
            )
        return None

    def _faults(self) -> Faults:
        yield from super()._faults()
        section, adapter = self.federated, self.model.adapter
        own_files = None if self.data.labelled is None else self.data.labelled.own_task
        if section.algorithm.kind == "scaffold" and (self.optimizer.kind != "sgd" or self.optimizer.momentum):
            yield (
                'federated.algorithm.kind = "scaffold" corrects plain gradients; set optimizer.kind = "sgd" and '
                "optimizer.momentum = 0.0"
            )
        if section.simulated is not None and self.privacy is not None:
            yield (
                "federated.simulated excludes [privacy]: a site's ledger and its noise are its own process's secrets; "
                "remove one"
            )
        if section.exchange != "factors" and not isinstance(adapter, LoraConfig):
            yield (
                f'federated.exchange = "{section.exchange}" needs the two factors of LoRA; set '
                'model.adapter.kind = "lora", or remove it'
            )
        elif section.exchange != "factors" and isinstance(adapter, LoraConfig) and adapter.dora:
            yield (
                f'federated.exchange = "{section.exchange}" averages the products of the factors exactly, but '
                "not DoRA's magnitudes; set model.adapter.dora = false, or remove exchange"
            )
        if self.train.precision == "bf16_weights" and self.model.base_quantization is not None:
            yield (
                'train.precision = "bf16_weights" excludes model.adapter.quantize: unpacked matrices would be rounded '
                'twice; set precision = "bf16"'
            )
        if own_files is not None and len(own_files.train) != len(section.sites):
            yield (
                f"data.labelled.task names files of {len(own_files.train)} clients, but federated.sites has "
                f"{len(section.sites)} names; give each site its own files, in the same order"
            )
        if section.privacy is not None and self.data.tokenizer.kind == "bpe":
            yield (
                'federated.privacy excludes data.tokenizer.kind = "bpe": a vocabulary trained on the sites\' '
                'text reveals it without noise; use "model", or "file" with one of public text'
            )

    def _whole_step_faults(self, parties: str, part: str) -> Faults:
        """Describe what sites that train by several parties lack."""
        section = self.federated
        if section.simulated is not None:
            yield f"federated.simulated: its sites have no processes, and {parties} would be some; remove {part}"
        if section.algorithm.kind in ("fedprox", "scaffold"):
            yield (
                f'federated.algorithm.kind = "{section.algorithm.kind}" corrects each gradient of a site, but '
                f"{parties} make whole steps; choose another kind, or remove {part}"
            )
        if section.exchange == "frozen_a":
            yield (
                f'federated.exchange = "frozen_a" trains one factor of each adapter, but {parties} train both; '
                f'set "factors" or "product", or remove {part}'
            )
        if section.personal:
            yield f"federated.personal: {parties} send all trained weights; remove it, or remove {part}"

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        if privacy.mean_rows is not None:
            yield "privacy.mean_rows: a step draws train.batch_size rows on average here; remove it"
        if self.federated.privacy is not None:
            yield "federated.privacy: a site would have two budgets, without a joint bound; remove one"

    @property
    def _privately_learned(self) -> tuple[str, ...]:
        return LEARNED_AT_SITES

    @property
    def batches_a_step(self) -> int:
        return self.federated.num_asked * self.federated.local_steps

    @property
    def text_parties(self) -> tuple[str, ...]:
        return self.federated.sites

    @property
    def workers(self) -> tuple[str, ...]:
        return self.federated.sites

    @property
    def pki(self) -> str | None:
        return self.federated.pki

    @property
    def certified_elsewhere(self) -> tuple[str, ...]:
        return self.federated.sites if self.federated.pki else ()

    @property
    def site_world(self) -> tuple[int, int]:
        """Processes of a site, and the stages that they hold."""
        return 1, 1

    @property
    def world(self) -> dict[str, int]:
        sites, (processes, stages) = len(self.federated.sites), self.site_world
        started = 0 if self.federated.simulated is not None else sites * processes
        return {"processes": 1 + started, "stages": stages, "sites": sites}


class FederatedRankRun(FederatedRun, RankedBase):
    """A run of sites that each train by ranks of ``[parallel]``."""

    engine: ClassVar[str] = "federated+parallel"

    def _faults(self) -> Faults:
        yield from super()._faults()
        yield from self._whole_step_faults("ranks of [parallel]", "[parallel]")
        if self.parallel.outer is not None or self.parallel.max_dp_copies > self.parallel.dp:
            yield (
                "parallel.outer and parallel.max_dp: a site has a fixed number of ranks and one model; remove "
                "them with [federated]"
            )

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        yield from super()._privacy_faults(privacy)
        yield from self._private_layout_faults()

    @property
    def steps_a_rate(self) -> int:
        return self.federated.local_steps

    @property
    def site_world(self) -> tuple[int, int]:
        return self.parallel.num_ranks, 1


class FederatedPipelineRun(FederatedRun, GuardedBase):
    """A run of sites that each own a verified pipeline."""

    engine: ClassVar[str] = "federated+pipeline"

    @classmethod
    def _section_fault(cls, names: Collection[str]) -> RefusedKeyError | None:
        if "parallel" in names:
            return exclusion("parallel", "pipeline", ABSENT_SECTIONS[cls.engine]["parallel"])
        return None

    def _faults(self) -> Faults:
        yield from super()._faults()
        yield from self._whole_step_faults("stages of [pipeline]", "[pipeline]")
        if self.pipeline.stages < _MIN_SITE_STAGES:
            yield (
                f"pipeline.stages = {self.pipeline.stages} with [federated]: the owner of a site's pipeline has "
                f"the first and the last stage, and workers need one between them; set it to {_MIN_SITE_STAGES} "
                "or more"
            )

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        yield "[pipeline] with [federated]: stages with a site's own budget are not supported yet; remove one"

    @property
    def site_world(self) -> tuple[int, int]:
        return 1 + len(self.pipeline.worker_names), self.pipeline.stages

    @property
    def site_pipeline(self) -> PipelineRun:
        """The run that a site's pipeline is: the same stages and guard, local steps in the place of rounds."""
        rounds = ("federated", "evaluate")
        sections: dict[str, Any] = {name: section for name, section in self.written.items() if name not in rounds}
        # the owner of the rounds evaluates; nothing is saved: a round begins with weights that the site is sent
        run = PipelineRun(**sections | {"checkpoint": CheckpointConfig(journal=False)})
        return run.placed_at(self.name, self.home).of_length(self.train.steps * self.federated.local_steps)
