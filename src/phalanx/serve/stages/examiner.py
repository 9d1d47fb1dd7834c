"""The owner's checks of texts: a fast control run, and the one judge before anybody is accused."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import DiskError, EvidenceError, FrameError, ModelError
from phalanx.models import ModelSource, weights_digest
from phalanx.pipeline.evidence.checked import Pins, certified_peers, peer_lookup
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.serve.stages.blocks import StageBlocks
from phalanx.serve.stages.evidence import write_stage_evidence
from phalanx.serve.stages.judgement import (
    PieceRecord,
    StageBundle,
    StageVerdict,
    first_piece_off,
    judge_stage_bundle,
    measure_pieces,
)
from phalanx.serve.stages.transcript import StageTranscript

_log = logging.getLogger(__name__)
_RUN_ROWS = 512
"""Tokens of one control run."""


class StageExamination(NamedTuple):
    """The result of redoing one text at one party.

    Attributes:
        is_off: Something is beyond the tolerance.
        verdict: Convicts the party, with evidence written; None for one that is convicted already.
        doubt: Why nothing could be decided.
    """

    is_off: bool = False
    verdict: StageVerdict | None = None
    doubt: str | None = None


class StageExaminer:
    """Redoes what parties have signed; it alone convicts, and only where `judge_stage_bundle` does.

    Args:
        source: The files of the model, which are read again where a stage is not in memory.
        kept_stages: Stages whose weights are kept in memory.

    Attributes:
        worst_distance: Largest distance of a piece that was within the tolerance.
    """

    def __init__(self, desk: EvidenceDirectory, source: ModelSource, kept_stages: int) -> None:
        self._desk, self._source, self._kept_stages = desk, source, kept_stages
        self._peer = peer_lookup(certified_peers(desk.directory, desk, Pins())[1])
        self._blocks: OrderedDict[tuple[int, int], StageBlocks] = OrderedDict()
        self._convicted: set[str] = set()
        self._lock = threading.Lock()
        self.worst_distance = 0.0

    def examine(self, transcript: StageTranscript) -> StageExamination:
        """Redo all pieces of a text at one party."""
        with self._lock:
            try:
                return self._examine(transcript)
            except (ModelError, EvidenceError, FrameError, SafetensorError, OSError, RuntimeError, ValueError) as exc:
                return StageExamination(doubt=str(exc))

    def judge(self, bundle: StageBundle) -> StageVerdict | None:
        """Have the one judge decide; where it convicts, the records are written as evidence if the disk takes them."""
        try:
            verdict = judge_stage_bundle(bundle, self._desk.session, self._peer)
        except EvidenceError:
            return None
        if verdict is None:
            return None
        self._convicted.add(verdict.party)
        try:
            return write_stage_evidence(self._desk, bundle, verdict)
        except (DiskError, SafetensorError, OSError) as exc:
            # a party that lies must not stay because the disk is full
            _log.error("%s is guilty, and no evidence could be written: %s", verdict.party, exc)
            return verdict.model_copy(update={"reason": f"{verdict.reason}; no evidence could be written"})

    def _examine(self, transcript: StageTranscript) -> StageExamination:
        party, offer = transcript.party, transcript.party.offer
        blocks = self._stage_of(transcript)
        truth = _redo_pieces(blocks, [piece.inputs for piece in transcript.pieces])
        distances = measure_pieces(truth, [piece.outputs for piece in transcript.pieces])
        place = first_piece_off(distances, offer.tolerance)
        if place is None:
            self.worst_distance = max(self.worst_distance, *distances)
            return StageExamination()
        if party.name in self._convicted:
            return StageExamination(is_off=True)
        pieces = transcript.pieces[: place + 1]
        bundle = StageBundle(
            party.name,
            party.offer_header,
            pieces[-1].header,
            text=transcript.number,
            pieces=[PieceRecord(start=p.start, length=len(p.inputs), outputs=p.digest) for p in pieces],
            inputs=torch.cat([piece.inputs for piece in pieces]),
            output=pieces[-1].outputs,
            weights=blocks.weights,
        )
        verdict = self.judge(bundle)
        if verdict is None:
            return StageExamination(doubt="a fast control run and the judge's differ: the tolerance is at rounding")
        return StageExamination(is_off=True, verdict=verdict)

    def _stage_of(self, transcript: StageTranscript) -> StageBlocks:
        offer = transcript.party.offer
        layers = (offer.first_layer, offer.end_layer)
        blocks = self._blocks.pop(layers, None)
        if blocks is None:
            blocks = StageBlocks.read(self._source, layers)
            if weights_digest(blocks.weights.items()) != offer.weights:
                raise ModelError(f"{self._source.directory}: the weights are not those that were served")
        self._blocks[layers] = blocks
        while len(self._blocks) > self._kept_stages:
            self._blocks.popitem(last=False)
        return blocks


def _redo_pieces(blocks: StageBlocks, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the pieces of one text, as many at a time as a run takes; each attends to earlier tokens alone."""
    text = blocks.open_text()
    outputs: list[Tensor] = []
    batch: list[Tensor] = []
    for part in [*inputs, None]:
        if batch and (part is None or sum(map(len, batch)) + len(part) > _RUN_ROWS):
            states = blocks.extend([(text, len(part)) for part in batch], torch.cat(batch))
            outputs.extend(torch.split(states, [len(part) for part in batch]))
            batch = []
        if part is not None:
            batch.append(part)
    return outputs
