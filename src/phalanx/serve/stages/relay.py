"""The owner's side of served stages: steps out, signed answers in, shadows in the place of who leaves, drawn checks."""

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, float32

from phalanx.config import canonical_json, printable_text
from phalanx.errors import CertificateError, FrameError, PeerLostError, PeerRefusedError, PhalanxError, TransportError
from phalanx.models import ModelSource, weights_digest
from phalanx.rollouts.bundle import digest_of_answer
from phalanx.serve.engine.attention import Segment
from phalanx.serve.engine.row_cache import RowCache
from phalanx.serve.stages.blocks import StageBlocks
from phalanx.serve.stages.config import StagesConfig
from phalanx.serve.stages.examiner import StageExaminer
from phalanx.serve.stages.groups import SentStep, StagedTexts, cut_groups
from phalanx.serve.stages.judgement import StageBundle, StageVerdict, find_form_fault, first_piece_off, measure_pieces
from phalanx.serve.stages.messages import (
    MAX_PIECES,
    TO_SERVER,
    StageAnswer,
    StageFilePart,
    StageOffer,
    StageReady,
    StageRefusal,
    StagesEnd,
    StageStep,
    TokenPiece,
    states_digest,
)
from phalanx.serve.stages.transcript import (
    DepartedError,
    DepartureCause,
    KeptPiece,
    PartyCounts,
    ServedText,
    ServedTextDraw,
    StageLostError,
    StageParty,
    StageTranscript,
)
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, parse_body
from phalanx.transport.tensors import tensor_buffers, tensor_from

_PART_BYTES = 2**22
_LOOK_EVERY_S = 0.5
_SPARE_FRAMES = 16
_REPLAY_ROWS = 512
_MAX_NEWS = 10_000
_REVOCATIONS_EVERY_S = 1.0

Tell = Callable[[str, Mapping[str, str | int]], None]
"""Takes the kind and the facts of an event for the log of requests."""


class StageRelay:
    """Runs hidden states through the stages of a served model; its calls are the decode thread's.

    Args:
        endpoint: The owner's; the parties are its peers.
        source: The files of the whole model.
        key: Secret of the draw, 32 bytes.
        is_alive: Whether a party's process runs, where it is one of this machine.

    Attributes:
        verdicts: Convictions in the order of their detection.
        departures: Every party that was taken out, with the cause.
        read_revocations: Returns the parties whose certificates the owner has taken back; by default none.

    Guarantees:
        A party is convicted where `judge_stage_bundle` convicts it by the records that are written as evidence, and
        nowhere else; where the disk takes no evidence, it is taken out all the same, and its reason says so. A text in
        which a conviction or a takeover shows a lie ends with an error. A text that was not
        drawn may hold a lie: the log says which texts were.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: StagesConfig,
        source: ModelSource,
        examiner: StageExaminer,
        key: bytes,
        is_alive: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._endpoint, self._config, self._source, self._examiner = endpoint, config, source, examiner
        self._draw, self._is_alive = ServedTextDraw(key, config.check_rate), is_alive
        self.read_revocations: Callable[[], Collection[str]] = tuple
        self._next_look = time.monotonic()
        self._stages: list[list[StageParty]] = []
        self._parties: dict[str, StageParty] = {}
        self._texts: dict[RowCache, ServedText] = {}
        self._num_texts = 0
        self._width = source.hidden_size
        self._faults: dict[str, DepartedError] = {}
        self._convicted: queue.SimpleQueue[StageVerdict] = queue.SimpleQueue()
        self._checks: queue.Queue[ServedText | None] = queue.Queue(config.max_waiting_checks)
        self._checker = threading.Thread(target=self._run_checks, name="stage-checks", daemon=True)
        self._news: deque[tuple[str, Mapping[str, str | int]]] = deque(maxlen=_MAX_NEWS)
        self._tell: Tell | None = None
        self._tell_lock = threading.Lock()
        self._counts = PartyCounts()
        self.verdicts: list[StageVerdict] = []
        self.departures: dict[str, str] = {}

    @property
    def bytes_moved(self) -> int:
        """Bytes of all frames in both directions, up to now."""
        return sum(self._endpoint.bytes_sent.values()) + sum(self._endpoint.bytes_received.values())

    @property
    def worst_distance(self) -> float:
        """Largest distance of an honest piece that was redone."""
        return self._examiner.worst_distance

    def load_stages(self, layers: Sequence[tuple[int, int]], max_texts: int, max_tokens: int) -> None:
        """Send each party its weights, and wait until all have loaded them.

        Args:
            layers: First layer of each stage, and the one behind its last.

        Raises:
            PeerLostError: A party is gone, refuses, or has not loaded its weights in time.
        """
        config = canonical_json(self._source.hub_config_dict).decode()
        for index, (place, names) in enumerate(zip(layers, self._config.holders, strict=True)):
            weights = StageBlocks.read(self._source, place).weights
            file = save({name: tensor.contiguous() for name, tensor in weights.items()})
            offer = StageOffer(
                config=config,
                first_layer=place[0],
                end_layer=place[1],
                weights=weights_digest(weights.items()),
                size_bytes=len(file),
                tolerance=self._config.tolerance,
                max_texts=max_texts,
                max_tokens=max_tokens,
            )
            self._stages.append([self._offer_stage(name, index, offer, file) for name in names])
        self._await_ready()
        self._checker.start()

    def listen(self, tell: Tell | None) -> None:
        """Have events told from now on, those from before included."""
        with self._tell_lock:
            self._tell = tell
            while tell is not None and self._news:
                tell(*self._news.popleft())

    def find_number(self, cache: RowCache) -> int | None:
        """Return the number of an open text, by which log lines name it."""
        text = self._texts.get(cache)
        return None if text is None else text.number

    def find_fault(self, cache: RowCache) -> PhalanxError | None:
        """Return why a text cannot go on: a party that lied had a part in it."""
        text = self._texts.get(cache)
        if text is None or not text.is_refuted:
            return None
        return StageLostError("a machine that computed a part of this text gave wrong results; ask again")

    def run_stages(self, segments: list[Segment], hidden: Tensor) -> Tensor:
        """Run the next tokens of texts through every stage.

        Args:
            hidden: ``[tokens, dim]``, the segments behind one another.

        Groups of texts follow one another, so that a stage computes one while the next stage computes the one before.
        """
        self._apply_revocations()
        self._apply_verdicts()
        texts = [self._open_text(segment) for segment in segments]
        parts = [part.clone() for part in torch.split(hidden, [segment.length for segment in segments])]
        groups = [
            StagedTexts(texts[place], parts[place])
            for place in cut_groups([segment.length for segment in segments], len(self._stages))
        ]
        self._run_groups(groups)
        return torch.cat([part for group in groups for part in group.parts])

    def end_text(self, cache: RowCache) -> None:
        """Close a text, draw whether it is redone, and forget it."""
        text = self._texts.pop(cache, None)
        if text is None:
            return
        for transcripts in text.transcripts:
            for transcript in transcripts:
                transcript.party.closed.append(transcript.number)
        done = text.all_transcripts
        is_drawn = bool(done) and not text.is_refuted and self._draw.is_drawn(text.number, done)
        if is_drawn:
            self._checks.put(text)
            return
        self._counts.add_text(done, is_checked=False)
        self._report("text_checked", {"text": text.number, "re-checked": "refuted" if text.is_refuted else "no"})

    def finish_checks(self) -> None:
        """Wait until every text that was drawn is redone."""
        self._checks.join()

    def close(self) -> None:
        """Redo the drawn texts, look at the frames that have come since, and tell the parties that nothing follows."""
        if self._checker.is_alive():
            self._checks.put(None)
            self._checker.join()
        with contextlib.suppress(DepartedError, TransportError):
            while (item := self._endpoint.receive_item(0.0)) is not None:
                self._take_item(item)
        for names in self._stages:
            for party in names:
                # a party that is gone need not be told
                with contextlib.suppress(TransportError):
                    self._endpoint.send_frame(party.name, StagesEnd.kind, {})

    def _offer_stage(self, name: str, index: int, offer: StageOffer, file: bytes) -> StageParty:
        header = self._endpoint.send_frame(name, offer.kind, offer.model_dump(mode="json"))
        for offset in range(0, len(file), _PART_BYTES):
            part = StageFilePart(offer=offer.digest, offset=offset)
            self._endpoint.send_frame(
                name, part.kind, part.model_dump(mode="json"), [file[offset : offset + _PART_BYTES]]
            )
        party = self._parties[name] = StageParty(name, index, offer, header)
        return party

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._config.join_timeout_s
        while missing := [party.name for party in self._parties.values() if not party.is_ready]:
            for name in missing:
                if name in self._faults:
                    raise PeerLostError(f"{self._faults[name]}")
                if not self._is_alive(name):
                    raise PeerLostError(f"{name}: its process ended before it had loaded its stage")
            if time.monotonic() > deadline:
                raise PeerLostError(f"{', '.join(missing)}: not ready within {self._config.join_timeout_s:g} s")
            item = self._endpoint.receive_item(_LOOK_EVERY_S)
            if item is not None:
                self._take_item(item)

    def _open_text(self, segment: Segment) -> ServedText:
        text = self._texts.get(segment.cache)
        if text is None:
            if segment.start:
                raise PhalanxError(f"a text goes on at token {segment.start} that the stages have not begun")
            text = ServedText(self._num_texts, [deque() for _ in self._stages])
            self._texts[segment.cache] = text
            self._num_texts += 1
        return text

    def _run_groups(self, groups: Sequence[StagedTexts]) -> None:
        """Lead each group through all stages; a stage has one group at a time, in their order."""
        waiting = [deque(groups), *(deque[StagedTexts]() for _ in self._stages)]
        running: dict[int, StagedTexts] = {}
        while len(waiting[-1]) < len(groups):
            index = -1
            try:
                for index in range(len(self._stages)):
                    if waiting[index] and index not in running:
                        self._send_group(index, waiting[index][0])
                        running[index] = waiting[index].popleft()
                index = self._await_answer({place: group.require_step() for place, group in running.items()})
                running[index].parts = self._take_answer(running[index].require_step())
                waiting[index + 1].append(running.pop(index))
            except DepartedError as departure:
                index = self._parties[departure.party].stage
                if index in running:
                    waiting[index].appendleft(running.pop(index))
                self._replace_party(index, departure)

    def _send_group(self, index: int, group: StagedTexts) -> None:
        party = self._require_party(index)
        transcripts = [self._transcript_of(text, party) for text in group.texts]
        group.step = self._send_step(party, list(zip(transcripts, group.parts, strict=True)))

    def _require_party(self, index: int) -> StageParty:
        if not self._stages[index]:
            raise StageLostError(f"stage {index} of the model has no machine left; ask again later")
        return self._stages[index][0]

    @staticmethod
    def _transcript_of(text: ServedText, party: StageParty) -> StageTranscript:
        transcripts = text.transcripts[party.stage]
        if not transcripts or transcripts[-1].party is not party:
            transcripts.append(party.open_transcript())
        return transcripts[-1]

    def _ask_party(self, party: StageParty, parts: Sequence[tuple[StageTranscript, Tensor]]) -> None:
        """Have one party run pieces, each of which stands in its text's transcript afterwards.

        Raises:
            DepartedError: It does not answer, or is convicted; the transcripts are as before.
        """
        step = self._send_step(party, parts)
        self._await_answer({party.stage: step})
        self._take_answer(step)

    def _send_step(self, party: StageParty, parts: Sequence[tuple[StageTranscript, Tensor]]) -> SentStep:
        """Send pieces to a party that owes no answer.

        Raises:
            DepartedError: It cannot be reached.
        """
        if party.name in self._faults:
            raise self._faults[party.name]
        pieces, ends = [], {transcript: transcript.length for transcript, _ in parts}
        for transcript, states in parts:
            pieces.append(TokenPiece(text=transcript.number, start=ends[transcript], length=len(states)))
            ends[transcript] += len(states)
        closed, party.closed = party.closed[:MAX_PIECES], party.closed[MAX_PIECES:]
        step = StageStep(offer=party.offer.digest, order=party.order, pieces=tuple(pieces), closed=tuple(closed))
        party.order += 1
        sent = bytes(tensor_buffers(torch.cat([states for _, states in parts]).to(float32).contiguous()))
        try:
            header = self._endpoint.send_frame(party.name, step.kind, step.model_dump(mode="json"), [sent])
        except (PeerLostError, PeerRefusedError) as exc:
            raise DepartedError(party.name, "lost", str(exc)) from exc
        party.awaited, party.arrived = header.header_digest, None
        return SentStep(party, parts, step, header, sent, time.monotonic() + self._config.answer_timeout_s)

    def _take_answer(self, sent: SentStep) -> list[Tensor]:
        """Put the answer that has arrived into the transcripts, and return its hidden states by text.

        Raises:
            DepartedError: It is not of its step; the transcripts are as before.
        """
        party, parts, step, frame = sent.party, sent.parts, sent.step, sent.party.arrived
        if frame is None:
            raise DepartedError(party.name, "silent", "no answer")
        party.arrived = None
        party.keep_answer(sent.header.header_digest, frame.header)
        answer, received = StageAnswer.model_validate_json(canonical_json(frame.body)), bytes(frame.payload)
        links = {transcript.number: transcript.link for transcript, _ in parts}
        if answer.offer != step.offer or find_form_fault(step, answer, sent.payload, received, links) is not None:
            previous = {t.pieces[-1].header.header_digest: t.pieces[-1].header for t, _ in parts if t.pieces}
            bundle = StageBundle(
                party.name,
                party.offer_header,
                frame.header,
                sent.header,
                previous=tuple(previous.values()),
                sent=sent.payload,
                received=received,
            )
            self._accuse(party, bundle, "its answer is not of its step")
        lengths = [len(states) for _, states in parts]
        outputs = torch.split(tensor_from(received, float32, (sum(lengths), self._width)), lengths)
        results: list[Tensor] = []
        for (transcript, states), signed, rows in zip(parts, answer.pieces, outputs, strict=True):
            # memory of its own: a text that goes on keeps nothing of those that are over
            result = rows.clone()
            digest = states_digest(result)
            transcript.pieces.append(KeptPiece(signed.start, states, result, digest, signed.link, frame.header))
            results.append(result)
        self._screen_finite(party, [transcript for transcript, _ in parts])
        return results

    def _screen_finite(self, party: StageParty, transcripts: Sequence[StageTranscript]) -> None:
        """Look at numbers that are none at once; where the stage does not give them, its party is convicted."""
        for transcript in dict.fromkeys(transcripts):
            if math.isfinite(float(transcript.pieces[-1].outputs.sum())):
                continue
            examination = self._examiner.examine(transcript)
            if examination.is_off:
                self._note_verdict(examination.verdict)
                for other in transcripts:
                    other.pieces.pop()
                raise DepartedError(party.name, "convicted", "gave numbers that are none")

    def _await_answer(self, steps: Mapping[int, SentStep]) -> int:
        """Wait until one of the steps is answered, and return its key.

        Raises:
            DepartedError: One of the parties does not answer.
        """
        while True:
            for key, step in steps.items():
                if step.party.arrived is not None:
                    return key
            left_s = min(step.deadline for step in steps.values()) - time.monotonic()
            item = self._endpoint.receive_item(max(0.0, min(_LOOK_EVERY_S, left_s)))
            if item is not None:
                self._take_item(item)
            for step in steps.values():
                name = step.party.name
                if name in self._faults:
                    raise self._faults[name]
                if item is None and not self._is_alive(name):
                    raise DepartedError(name, "lost", "its process ended")
                # what has come in time may wait in the queue, behind the work of a takeover
                if item is None and step.deadline <= time.monotonic():
                    raise DepartedError(name, "silent", f"no answer within {self._config.answer_timeout_s:g} s")

    def _take_item(self, item: CheckedFrame | LinkFault) -> None:
        """Look at an item; the answer that its party owes is put there."""
        if isinstance(item, LinkFault):
            self._note_fault(item.peer, "lost", str(item.error))
            return
        party = self._parties.get(item.sender)
        if party is None or item.sender in self.departures:
            return
        party.num_frames += 1
        if party.num_frames > party.order + _SPARE_FRAMES:
            self._note_fault(party.name, "frames", f"sent {party.num_frames} frames for {party.order} steps")
            return
        try:
            body: Any = parse_body(TO_SERVER, item.kind, item.body)
        except FrameError as exc:
            self._note_fault(party.name, "frames", f"sent a malformed frame: {exc}")
            return
        match body:
            case StageReady():
                party.is_ready = body.offer == party.offer.digest
            case StageRefusal():
                self._note_fault(party.name, "refused", body.reason)
            case StageAnswer() if party.awaited and body.step == party.awaited:
                party.awaited, party.arrived = "", item
            case StageAnswer():
                self._compare_answers(party, body, item)

    def _compare_answers(self, party: StageParty, answer: StageAnswer, item: CheckedFrame) -> None:
        """Look at a further answer to a step: a different one convicts its party."""
        first = party.answers.get(answer.step)
        if first is None or digest_of_answer(first) == digest_of_answer(item.header):
            return
        bundle = StageBundle(party.name, party.offer_header, first, second_answer=item.header)
        verdict = self._examiner.judge(bundle)
        if verdict is not None:
            self._note_verdict(verdict)
            self._faults[party.name] = DepartedError(party.name, "convicted", verdict.reason)

    def _accuse(self, party: StageParty, bundle: StageBundle, reason: str) -> None:
        """Have the judge look at an answer that cannot be used.

        Raises:
            DepartedError: Always: the party is convicted, or taken out where the records do not suffice.
        """
        verdict = self._examiner.judge(bundle)
        self._note_verdict(verdict)
        raise DepartedError(party.name, "frames" if verdict is None else "convicted", reason)

    def _note_fault(self, name: str, cause: DepartureCause, reason: str) -> None:
        self._faults.setdefault(name, DepartedError(name, cause, printable_text(reason, 200)))

    def _note_verdict(self, verdict: StageVerdict | None) -> None:
        """Record a conviction; any thread may."""
        if verdict is None or verdict.party in {earlier.party for earlier in self.verdicts}:
            return
        self.verdicts.append(verdict)
        self._report(
            "stage_convicted",
            {
                "party": verdict.party,
                "first_layer": verdict.first_layer,
                "offence": verdict.offence,
                "reason": verdict.reason,
                "evidence": verdict.evidence or "",
                "unchecked_texts": self._counts.num_unchecked(verdict.party),
            },
        )

    def _apply_revocations(self) -> None:
        """Find fault with revoked parties; where nobody knows who is, nothing is asked of anybody."""
        if time.monotonic() < self._next_look:
            return
        try:
            revoked = self._parties.keys() & set(self.read_revocations())
        except CertificateError as exc:
            raise StageLostError("the list of revocations cannot be read; ask again later") from exc
        self._next_look = time.monotonic() + _REVOCATIONS_EVERY_S
        for name in revoked:
            self._note_fault(name, "revoked", "its certificate was revoked")

    def _apply_verdicts(self) -> None:
        """Take out the parties that a check has convicted since the last step, and shadows that are gone."""
        while not self._convicted.empty():
            verdict = self._convicted.get()
            self._faults[verdict.party] = DepartedError(verdict.party, "convicted", verdict.reason)
            if verdict.party in self.departures:
                self._settle_earlier_parts(verdict.party)
        for index, parties in enumerate(self._stages):
            for party in list(parties):
                if party.name in self._faults:
                    self._replace_party(index, self._faults[party.name])

    def _replace_party(self, index: int, departure: DepartedError) -> None:
        """Take a party out; where it served its stage, the next one goes on with every open text."""
        self._remove_party(index, departure)
        while self._stages[index]:
            party = self._stages[index][0]
            try:
                for text in self._texts.values():
                    self._hand_over(text, party, has_lied=departure.cause == "convicted")
            except DepartedError as other:
                self._remove_party(index, other)
                continue
            return
        for text in self._texts.values():
            if any(record.party.name == departure.party for record in text.transcripts[index]):
                text.is_refuted = text.is_refuted or departure.cause == "convicted"
        self._require_party(index)

    def _remove_party(self, index: int, departure: DepartedError) -> None:
        name = departure.party
        self._stages[index] = [party for party in self._stages[index] if party.name != name]
        if name in self.departures:
            return
        self.departures[name] = departure.cause
        self._endpoint.evict_party(name)
        self._report("stage_lost", {"party": name, "cause": departure.cause, "reason": departure.reason})

    def _hand_over(self, text: ServedText, party: StageParty, *, has_lied: bool) -> None:
        """Have a shadow redo all pieces of an open text; a difference is looked into at once.

        Args:
            has_lied: The party before was convicted; a shadow, who may be its accomplice, does not clear it.
        """
        transcripts = text.transcripts[party.stage]
        if not transcripts or transcripts[-1].party is party:
            return
        if not transcripts[-1].pieces:
            transcripts.pop()
            return
        earlier, later = transcripts[-1], party.open_transcript()
        batch: list[tuple[StageTranscript, Tensor]] = []
        for piece in [*earlier.pieces, None]:
            if batch and (piece is None or sum(len(states) for _, states in batch) + len(piece.inputs) > _REPLAY_ROWS):
                self._ask_party(party, batch)
                batch = []
            if piece is not None:
                batch.append((later, piece.inputs))
        redone, signed = ([piece.outputs for piece in record.pieces] for record in (later, earlier))
        if has_lied or first_piece_off(measure_pieces(redone, signed), 2 * party.offer.tolerance) is not None:
            self._settle_difference(text, earlier, later)
        transcripts.append(later)

    def _settle_difference(self, text: ServedText, earlier: StageTranscript, later: StageTranscript) -> None:
        """Redo what two parties have computed otherwise."""
        shadow = self._examiner.examine(later)
        if shadow.is_off:
            self._note_verdict(shadow.verdict)
            raise DepartedError(later.party.name, "convicted", "computed otherwise than its stage")
        holder = self._examiner.examine(earlier)
        self._note_verdict(holder.verdict)
        # what cannot be decided is not trusted either
        text.is_refuted = text.is_refuted or holder.is_off or holder.doubt is not None

    def _settle_earlier_parts(self, name: str) -> None:
        """Recompute the parts of open texts that come from a party that has left and was convicted since."""
        for text in self._texts.values():
            for record in text.all_transcripts:
                if record.party.name == name:
                    examination = self._examiner.examine(record)
                    text.is_refuted = text.is_refuted or examination.is_off or examination.doubt is not None

    def _run_checks(self) -> None:
        """Redo drawn texts, one behind the other, until the relay closes."""
        while (text := self._checks.get()) is not None:
            self._report("text_checked", {"text": text.number, "re-checked": self._check_text(text)})
            self._checks.task_done()
        self._checks.task_done()

    def _check_text(self, text: ServedText) -> str:
        transcripts = text.all_transcripts
        outcome = "yes"
        for transcript in transcripts:
            examination = self._examiner.examine(transcript)
            if examination.is_off:
                outcome = "refuted"
            elif examination.doubt is not None and outcome == "yes":
                outcome = f"no ({examination.doubt})"
            if examination.verdict is not None:
                self._note_verdict(examination.verdict)
                self._convicted.put(examination.verdict)
        self._counts.add_text(transcripts, is_checked=not outcome.startswith("no"))
        return outcome

    def _report(self, kind: str, facts: Mapping[str, str | int]) -> None:
        with self._tell_lock:
            if self._tell is None:
                self._news.append((kind, facts))
            else:
                self._tell(kind, facts)
