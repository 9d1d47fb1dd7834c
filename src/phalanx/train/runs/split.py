"""A run of clients and an enclave, which has the whole back part of the model or owns a pipeline of its middle."""

from collections.abc import Collection
from typing import ClassVar, Literal

from phalanx.config import RefusedKeyError
from phalanx.data import BpeConfig
from phalanx.models import LoraConfig
from phalanx.split import ENCLAVE, SplitConfig
from phalanx.train.runs.base import REMOTE_TEXTS, BaseRun, Faults
from phalanx.train.runs.pipeline import StagedBase
from phalanx.train.runs.support import missing_section

_MIN_JOINED_STAGES = 3
"""Stages of the pipeline of an enclave, which has the first and the last one itself."""


class SplitRun(BaseRun):
    """A run of ``[split]``: clients have the front of the model and the text, an enclave has the back."""

    engine: ClassVar[str] = "split"
    split: SplitConfig

    def _faults(self) -> Faults:
        if self.model.adapter is None:
            yield "[split] trains adapters in the enclave, but [model] has none; add [model.adapter]"
        if self.split.clients > self.train.microbatches:
            yield (
                f"split.clients = {self.split.clients} share train.microbatches = {self.train.microbatches}, so "
                "some clients would get none; raise microbatches"
            )
        if self.split.mode == "masked":
            yield from self._masked_faults()
        yield from self._text_faults(is_remote=bool(self.split.remote_clients))
        yield from super()._faults()

    def _masked_faults(self) -> Faults:
        """Describe what frozen layers cannot have whose products untrusted workers make of integers."""
        adapter = self.model.adapter
        if self.computes_in != "fp32":
            yield (
                f'train.precision = "{self.train.precision}" excludes split.mode = "masked": masked products are of '
                'integers, which stand for float32; set precision = "fp32", or mode = "sealed"'
            )
        if self.model.base_quantization is not None:
            yield (
                'model.adapter.quantize excludes split.mode = "masked": a worker multiplies whole matrices as '
                'integers; remove it, or set mode = "sealed"'
            )
        if isinstance(adapter, LoraConfig) and adapter.dora:
            yield (
                'model.adapter.dora excludes split.mode = "masked": it reads the frozen matrices, which workers have; '
                'use rslora, or set mode = "sealed"'
            )

    @property
    def _unevaluated(self) -> dict[str, bool]:
        admission = self.split.admission
        return {
            "split.remote_clients, which measure their own texts only": bool(self.split.remote_clients),
            "split.admission.held_out_factor, which compares clients by what they measure": (
                admission is not None and admission.held_out_factor is not None
            ),
            **super()._unevaluated,
        }

    def _text_faults(self, *, is_remote: bool) -> Faults:
        """Describe texts that the run file gives to remote clients, which have their own, or lacks for local ones."""
        data, talks = self.data, self.data.conversations
        own_files = None if data.labelled is None else data.labelled.own_task
        if own_files is not None and bool(own_files.train) == is_remote:
            has = "has train and test files" if is_remote else "has no train and test files"
            yield f"data.labelled.task {has}: a run with local clients needs one file for each; {REMOTE_TEXTS}"
        if talks is not None and bool(talks.sources) == is_remote:
            yield (
                f"data.conversations.sources: not allowed; {REMOTE_TEXTS}"
                if is_remote
                else "data.conversations.sources: missing; add at least one"
            )
        if not is_remote:
            return
        if self.train.epochs is not None:
            yield "train.epochs: only remote clients know their number of texts; set train.steps"
        if not (own_files or talks or data.preferences) or isinstance(data.tokenizer, BpeConfig):
            yield (
                "split.remote_clients need labelled texts, conversations or preferences of their own, and a tokenizer "
                "that all parties have: set the classes of data.labelled.task, or data.conversations or "
                'data.preferences without sources, and data.tokenizer.kind = "model" or "file"'
            )
        if data.attention == "document":
            yield 'data.attention = "document": each conversation of a remote client is a separate row'

    @property
    def computes_in(self) -> Literal["fp32", "bf16"]:
        """What matrix products of both parts are computed in."""
        return "bf16" if self.train.precision == "bf16" else "fp32"

    @property
    def has_remote_texts(self) -> bool:
        return bool(self.split.remote_clients)

    @property
    def text_parties(self) -> tuple[str, ...]:
        return self.split.client_names

    @property
    def workers(self) -> tuple[str, ...]:
        return (ENCLAVE, *self.split.client_names, *self.split.masked_workers)

    @property
    def pki(self) -> str | None:
        return self.split.pki

    @property
    def certified_elsewhere(self) -> tuple[str, ...]:
        return (ENCLAVE,) if self.split.remote_enclave else ()

    @property
    def world(self) -> dict[str, int]:
        processes = 2 + len(self.split.masked_workers) + len(self.split.remote_clients)
        return {"processes": processes, "stages": 2, "clients": self.split.clients}


class SplitPipelineRun(SplitRun, StagedBase):
    """A split whose enclave owns a pipeline: workers serve the middle stages and see their hidden states."""

    engine: ClassVar[str] = "split+pipeline"

    @classmethod
    def _section_fault(cls, names: Collection[str]) -> RefusedKeyError | None:
        if "pipeline" not in names:
            return missing_section(
                "pipeline",
                "split.workers_see_hidden_states = true needs workers of middle stages, and there are none",
                "add [pipeline], or remove it",
            )
        return None

    def _faults(self) -> Faults:
        if self.pipeline.stages < _MIN_JOINED_STAGES:
            yield (
                f"pipeline.stages = {self.pipeline.stages} beside [split]: the enclave has the first and the "
                f"last stage, and workers need one between them; set it to {_MIN_JOINED_STAGES} or more"
            )
        yield from super()._faults()

    @property
    def world(self) -> dict[str, int]:
        world = super().world
        return {
            **world,
            "processes": world["processes"] + len(self.pipeline.worker_names),
            "stages": 1 + self.pipeline.stages,
        }
