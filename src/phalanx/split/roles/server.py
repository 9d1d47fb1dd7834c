"""The enclave's server: it answers its parties, and its messages define everything that leaves it."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from phalanx.errors import FrameError, PeerLostError, PeerRefusedError, PhalanxError, RollbackError
from phalanx.models import ModelSource, weights_digest
from phalanx.security.crypto import Identity
from phalanx.security.seal import PermittedRelease
from phalanx.split.admission.standings import refusal_facts
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import REFUSALS, FrameLink, PackedFrame, post_message
from phalanx.split.channel.message import SplitMessage
from phalanx.split.channel.resend_window import ReceiveWindow
from phalanx.split.channel.tensor_kinds import TensorKinds
from phalanx.split.hardware.state import StateKeeper
from phalanx.split.hardware.tier import open_epochs, open_tier
from phalanx.split.processes.local_enclave import OWNER, EnclaveConfig
from phalanx.split.processes.offload import Prepare, keep_layers
from phalanx.split.roles.enclave import Enclave, Replies
from phalanx.split.roles.handshake_server import HandshakeServer
from phalanx.split.roles.turns import ClientTurns
from phalanx.split.training.admitting_trainer import AdmittingTrainer
from phalanx.split.training.parts import all_weights, build_back
from phalanx.split.training.release import ReleaseMaker
from phalanx.split.training.task import kinds_of_task, task_of
from phalanx.split.training.trainer import BackTrainer, SplitTrainer
from phalanx.transport import CheckedFrame, Endpoint, LinkFault


@dataclass(frozen=True)
class BackPart:
    """The back part of one session.

    Attributes:
        admitting: The same, where admission decides which clients count; None where all do.
        kinds: Tensors that it takes from clients.
    """

    whole: BackTrainer
    admitting: AdmittingTrainer | None
    kinds: TensorKinds


def open_back(config: EnclaveConfig, source: ModelSource, prepare: Prepare) -> BackPart:
    """Cut the back part from a model.

    Args:
        prepare: Changes frozen weights before training.
    """
    split = config.split
    if config.model.adapter is None:
        raise FrameError("model.adapter: missing; the back part of a split trains adapters")
    back = build_back(
        source,
        split.cut,
        adapter=config.model.adapter,
        attention=config.model.attention,
        seed=config.seed,
        activation_checkpointing=config.model.activation_checkpointing,
        document_attention=config.document_attention,
    )
    task = task_of(config.objective, config.classes)
    trainer = BackTrainer(back, task, config.optimizer, config.steps, config.seed, precision=config.precision)
    # after the head is there: a masked split has no use for one that is replaced
    prepare(back)
    admission = split.admission
    admitting = None if admission is None else AdmittingTrainer(trainer, split.client_names, admission)
    width = source.hidden_size + config.document_attention
    kinds = kinds_of_task(task, config.rows, config.seq, width, split.wire)
    return BackPart(trainer, admitting, kinds)


MakeTrainer = Callable[[BackTrainer], SplitTrainer]
"""What trains, made of the trainer of the whole back part in this process."""
_TRAINER = "trainer"
"""Key of the trainer's part in the metadata of a sealed state."""
_OWNER_ONLY = (
    say.RestoreRequest,
    say.StateRequest,
    say.SettleRequest,
    say.WeightsRequest,
    say.PermitRequest,
    say.AdaptersRequest,
    ask.ClientTurn,
    ask.Conclude,
    say.End,
)
_FAREWELL_S = 3.0


class EnclaveServer:
    """The server of an enclave: messages in, answers out; one thread does it all.

    Args:
        prepare: Changes frozen weights of the back part before training.
        trains: Makes what trains; the back part in this process when left out.
    """

    def __init__(
        self,
        config: EnclaveConfig,
        identity: Identity,
        endpoint: Endpoint,
        source: ModelSource,
        prepare: Prepare = keep_layers,
        trains: MakeTrainer = lambda whole: whole,
    ) -> None:
        split, directory = config.split, Path(config.directory)
        self._config, self._endpoint, self._source = config, endpoint, source
        tier = self._tier = open_tier(split, directory, identity)
        self._keeper = StateKeeper(tier.key, config.run, tier.counter("sealed"), tier.counter("settled"))
        epochs = open_epochs(directory, tier.counter("epoch"))
        self._handshakes = HandshakeServer(config, identity, tier.attester, epochs, endpoint.known_peers)
        part = open_back(config, source, prepare)
        self._trainer = trains(part.whole) if part.admitting is None else part.admitting
        self._releasing = ReleaseMaker(split.release, self._trainer.trained_weights())
        self._enclave = Enclave(
            self._trainer, part.kinds, config.microbatches, split.client_names, self._releasing.gate
        )
        self._enclave.admission = part.admitting
        self._owner_link: FrameLink | None = None
        self._turns: ClientTurns | None = None
        if config.passes_turns:
            counts = self._enclave.counts_in_sums
            self._turns = ClientTurns(
                split.client_names,
                source.files_digest(),
                config.classes,
                counts=counts,
                num_pair_sums=part.kinds.num_pair_sums,
            )
            self._enclave.tally = self._turns
        self._lost_party = ""
        max_waiting = len(part.kinds.microbatch_kinds("train", config.rows)) * config.microbatches
        self._waiting = {name: ReceiveWindow(name, max_waiting) for name in split.client_names}
        self._replies: dict[str, tuple[say.Reply, PackedFrame]] = {}
        self._is_over, self._is_current = False, False
        self._counting_state = 0
        """Number of the first state that counts the latest release."""

    def announce_address(self, address: str) -> None:
        """Tell every party where the enclave listens."""
        for name in self._config.addresses:
            self._post_message(name, say.EnclaveReady(address=address))

    def serve_messages(self, look: Callable[[], None] = lambda: None) -> None:
        """Answer until the owner ends the session.

        Args:
            look: Called now and then; raises where the session cannot go on.
        """
        try:
            while not self._is_over:
                item = self._endpoint.receive_item(1.0)
                look()
                if isinstance(item, LinkFault):
                    self._lost_party = item.peer
                    raise PeerLostError(f"{item.peer}: {item.error}")
                if item is not None:
                    self.handle_message(item)
                    if self._lost_party:
                        raise PeerLostError(f"{self._lost_party}: left the run")
                if self._turns is not None:
                    self._tell_awaited_clients(self._turns)
        except PhalanxError as exc:
            self._tell_session_end(exc)
            raise
        finally:
            self._enclave.close()
            self._tier.close()

    def handle_message(self, item: CheckedFrame) -> None:
        """Handle one message, or refuse it to its sender."""
        try:
            message = say.parse_message(item.kind, item.body)
            if isinstance(message, _OWNER_ONLY) and item.sender != OWNER:
                raise PeerRefusedError(f"{item.sender}: only {OWNER} may request {item.kind!r}")
            answer = _ANSWERS.get(type(message))
            if answer is None:
                raise FrameError(f"{item.sender}: {item.kind!r} is not a request to an enclave")
            answer(self, item.sender, message, item)
        except PhalanxError as exc:
            if item.sender in self._waiting:
                self._waiting[item.sender].drop_waiting()
            self._post_message(item.sender, say.refusal_of(exc))
        self._tell_appraisals()

    # --- meeting ----------------------------------------------------------------------------------

    def _answer_evidence_request(self, sender: str, message: say.EvidenceRequest, item: CheckedFrame) -> None:
        self._post_message(sender, *self._handshakes.make_evidence_reply(sender, message))

    def _answer_call(self, sender: str, message: say.HandshakeCall, item: CheckedFrame) -> None:
        if self._turns is not None and sender in self._turns.data_commitments:
            # new keys begin the step anew, for which the others would wait: a client's new process is a new session
            raise FrameError(f"{sender}: has met the enclave and is ready; a new session begins with a new process")
        reply, link = self._handshakes.admit_party(sender, message, item.payload)
        if sender == OWNER:
            self._owner_link = link
        else:
            self._enclave.connect_client(sender, link)
            self._waiting[sender].reset_window()
        self._post_message(sender, say.Welcome(), reply)
        if sender == OWNER:
            self._tell_all_are_ready()

    def _appraise_again(self, sender: str, message: say.ClientEvidence, item: CheckedFrame) -> None:
        self._handshakes.appraise_again(sender, item.payload)
        self._post_message(sender, say.ClientEvidenceReply())

    # --- training ---------------------------------------------------------------------------------

    def _queue_upload(self, sender: str, message: say.Upload, item: CheckedFrame) -> None:
        if sender not in self._waiting:
            raise PeerRefusedError(f"{sender}: is not a client")
        self._check_current()
        self._handshakes.check_client(sender)
        if self._turns is not None:
            self._turns.check_turn(sender, message.what)
        self._waiting[sender].add_frame(message, item)
        self._take_due_frames()

    def _take_due_frames(self) -> None:
        """Frames of several clients come in any order; they are taken in that of their microbatches."""
        took = True
        while took:
            took = False
            for client, waiting in self._waiting.items():
                while (first := waiting.oldest_upload) and (
                    first.what == "held_out" or self._enclave.due_microbatch[0] == client
                ):
                    self._take_upload(client, *waiting.pop_frame())
                    took = True

    def _take_upload(self, client: str, message: say.Upload, item: CheckedFrame) -> None:
        place, digest = (message.what, message.microbatch, message.rows), item.header.fields.payload_digest
        try:
            replies = self._enclave.take_frame(client, *place, item.payload, digest)
        except PhalanxError as exc:
            again = self._waiting[client].refuse_frame() if isinstance(exc, REFUSALS) else None
            self._waiting[client].drop_waiting()
            self._post_message(client, again or say.refusal_of(exc))
            return
        self._waiting[client].note_opened()
        self._tell_refusals()
        self._send_replies(message, replies)
        self._tell_total()

    def _tell_refusals(self) -> None:
        """Tell the owner, before the step's result, which clients' microbatches do not count."""
        admission = self._enclave.admission
        for refusal in () if admission is None else admission.client_standings.pop_refusals():
            self._post_message(OWNER, ask.ClientRefused.model_validate(refusal_facts(refusal)))

    def _send_replies(self, message: say.Upload, replies: Replies) -> None:
        for client, frame in replies.items():
            reply = say.Reply(what=message.what, costs=self._current_costs())
            self._replies[client] = (reply, frame)
            self._post_message(client, reply, frame)

    def _current_costs(self) -> Costs:
        endpoint = self._endpoint
        return self._enclave.link_costs.add_costs(
            Costs(
                cpu_s=time.process_time(),
                digest_s=endpoint.seconds_hashing,
                signing_s=endpoint.seconds_signing,
                meeting_s=self._handshakes.meeting_seconds,
            )
        )

    def _repeat_reply(self, sender: str, message: say.RepeatRequest, item: CheckedFrame) -> None:
        if sender not in self._replies:
            raise FrameError(f"{sender}: was given no reply that could be sent again")
        self._post_message(sender, *self._replies[sender])

    # --- clients of other owners ------------------------------------------------------------------

    def _note_client_ready(self, sender: str, message: ask.ClientReady, item: CheckedFrame) -> None:
        turns = self._clients_turns(sender)
        # refused where it has not agreed on keys
        self._enclave.link_of(sender)
        turns.note_ready(sender, message)
        self._tell_all_are_ready()

    def _begin_turn(self, sender: str, message: ask.ClientTurn, item: CheckedFrame) -> None:
        self._turns_of_owner.begin_turn(message, self._trainer.num_steps)
        self._handshakes.require_renewal(message)
        self._post_clients(message)

    def _note_turn_done(self, sender: str, message: ask.TurnDone, item: CheckedFrame) -> None:
        self._clients_turns(sender).note_done(sender, message)
        self._tell_total()

    def _begin_conclusion(self, sender: str, message: ask.Conclude, item: CheckedFrame) -> None:
        self._turns_of_owner.begin_conclusion()
        self._post_clients(message)

    def _note_concluded(self, sender: str, message: ask.ConcludeReply, item: CheckedFrame) -> None:
        if self._clients_turns(sender).note_concluded(sender):
            self._post_message(OWNER, ask.ConcludeReply())

    def _note_client_left(self, sender: str, message: ask.ClientLeft, item: CheckedFrame) -> None:
        self._clients_turns(sender)
        self._lost_party = f"{sender} ({message.reason})"

    def _post_clients(self, message: SplitMessage) -> None:
        for name in self._config.split.client_names:
            self._post_message(name, message)

    @property
    def _turns_of_owner(self) -> ClientTurns:
        if self._turns is None:
            raise FrameError(f"{OWNER}: asks for turns, and plays all clients of this run itself")
        return self._turns

    def _clients_turns(self, sender: str) -> ClientTurns:
        if sender == OWNER or self._turns is None:
            raise PeerRefusedError(f"{sender}: is not a client of another owner")
        return self._turns

    def _tell_all_are_ready(self) -> None:
        """Tell an owner that has met the enclave that all clients have, and the results of their appraisals."""
        self._tell_appraisals()
        if self._turns is not None and self._turns.is_ready and self._owner_link is not None:
            self._post_message(OWNER, ask.ClientsReady(data=dict(self._turns.data_commitments)))

    def _tell_appraisals(self) -> None:
        """Tell an owner that has met the enclave which clients' evidence has passed and which has not."""
        for word in () if self._owner_link is None else self._handshakes.pop_appraisal_messages():
            self._post_message(OWNER, word)

    def _tell_total(self) -> None:
        """Tell the owner the result of a turn over all clients, sealed for it."""
        finished = None if self._turns is None else self._turns.pop_finished_turn()
        if finished is None or self._owner_link is None:
            return
        turn, numbers = finished[0], torch.tensor(finished[1], dtype=torch.float64)
        frame = self._owner_link.pack_tensor(TensorKinds.total_kind(turn.what, len(numbers)), turn.step, 0, numbers)
        self._post_message(OWNER, ask.TurnTotal(what=turn.what, step=turn.step, costs=self._current_costs()), frame)

    def _tell_awaited_clients(self, turns: ClientTurns) -> None:
        if names := turns.overdue_clients(self._enclave.due_microbatch[0]):
            self._post_message(OWNER, ask.AwaitedClients(names=names))

    def _tell_session_end(self, reason: PhalanxError) -> None:
        """Tell parties of other owners why the session ends."""
        # an owner that has not met the enclave yet hears of refusals all the same: they are why its run ends
        refused = [
            word for word in self._handshakes.pop_appraisal_messages() if isinstance(word, ask.ClientEvidenceRefused)
        ]
        with contextlib.suppress(PhalanxError):
            for word in refused:
                self._post_message(OWNER, word)
        for name in self._config.addresses if self._turns is not None else ():
            with contextlib.suppress(PhalanxError):
                self._post_message(name, say.refusal_of(reason))
        with contextlib.suppress(PhalanxError):
            self._endpoint.flush_frames(_FAREWELL_S)

    # --- states -----------------------------------------------------------------------------------

    def _restore_state(self, sender: str, message: say.RestoreRequest, item: CheckedFrame) -> None:
        if message.step:
            tensors, books = self._keeper.open_state(item.payload, message.step)
            metadata = books.pop(_TRAINER, {})
            self._trainer.check_metadata(metadata if isinstance(metadata, dict) else {})
            self._trainer.load_state(self._releasing.restore_release(tensors, books), message.step)
            self._enclave.gate = self._releasing.gate
            # who shows it has kept it: what was sealed before must not open beside it
            self._counting_state = self._keeper.state_number(item.payload, message.step)
            self._keeper.settle_state(self._counting_state)
            self._is_current = True
        self._enclave.restart_step()
        self._post_message(sender, say.RestoreReply(step=self._trainer.num_steps))

    def _check_current(self) -> None:
        """Return where nothing begins anew beside a state that is kept: neither training nor counts of releases."""
        if self._keeper.has_kept and not self._is_current:
            raise RollbackError(
                "the enclave has a saved state of this run but got none; --resume from the newest checkpoint, or, "
                "to start again, change the run file or give the enclave another directory"
            )

    def _send_sealed_state(self, sender: str, message: say.StateRequest, item: CheckedFrame) -> None:
        self._check_current()
        released, books = self._releasing.release_state()
        state, step = self._trainer.state_tensors(), self._trainer.num_steps
        # as they are once the state is agreed on
        metadata = self._trainer.state_metadata()
        books |= {_TRAINER: metadata} if metadata else {}
        blob, number = self._keeper.seal_state({**state, **released}, books, step)
        self._post_message(sender, say.SealedState(step=step, number=number), blob)

    def _settle_state(self, sender: str, message: say.SettleRequest, item: CheckedFrame) -> None:
        # a number that was settled long ago is no state to go on from
        self._check_current()
        self._keeper.settle_state(message.number)
        self._is_current = True
        self._post_message(sender, say.SettleReply())

    # --- the end ----------------------------------------------------------------------------------

    def _send_weights_digest(self, sender: str, message: say.WeightsRequest, item: CheckedFrame) -> None:
        weights = self._releasing.digested_weights(self._trainer.trained_weights())
        self._post_message(sender, say.WeightsReply(digest=weights_digest(all_weights(self._source, weights))))

    def _prepare_release(self, sender: str, message: say.PermitRequest, item: CheckedFrame) -> None:
        """Permit a release and count it. It leaves once a state that counts it is kept, and all before that are void.

        A state of before a release would allow it once more: with other noise, or with one other client's step in it.
        """
        known = self._releasing.latest_release
        release, _ = known or self._releasing.make_release(self._trainer.trained_weights())
        if known is None:
            self._counting_state = self._keeper.newest_number + 1
        self._post_message(sender, say.ReleaseReply(is_kept=self._is_release_kept, release=_facts_of(release)))

    def _send_release(self, sender: str, message: say.AdaptersRequest, item: CheckedFrame) -> None:
        link, latest = self._owner_link, self._releasing.latest_release
        if link is None:
            raise PeerRefusedError(f"{sender}: has not met the enclave yet")
        if latest is None or not self._is_release_kept:
            raise RollbackError("release: is permitted first, and leaves once a state that counts it is kept")
        release, tensors = latest
        step = self._trainer.num_steps
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            frame = link.pack_tensor(
                TensorKinds.adapter_kind(name, tuple(tensor.shape)), step, number, tensor.contiguous()
            )
            self._post_message(sender, say.ReleasePart(name=name, shape=tuple(tensor.shape)), frame)
        self._post_message(sender, say.ReleaseEnd(parts=len(tensors), release=_facts_of(release)))

    @property
    def _is_release_kept(self) -> bool:
        return self._keeper.is_settled(self._counting_state)

    def _state_transcript(self, sender: str, message: say.StatementRequest, item: CheckedFrame) -> None:
        link = self._owner_link if sender == OWNER else self._enclave.link_of(sender)
        self._post_message(sender, say.StatementReply(), b"" if link is None else link.signed_statement())

    def _end_session(self, sender: str, message: say.End, item: CheckedFrame) -> None:
        self._is_over = True

    def _post_message(self, receiver: str, message: SplitMessage, payload: bytes | bytearray = b"") -> None:
        if isinstance(payload, PackedFrame):
            post_message(self._endpoint, receiver, message, payload)
        else:
            parts = (memoryview(payload),) if payload else ()
            self._endpoint.send_frame(receiver, message.kind, message.model_dump(mode="json"), parts)


def _facts_of(release: PermittedRelease) -> say.ReleaseFacts:
    return say.ReleaseFacts(
        number=release.number,
        num_clients=release.num_clients,
        clip_norm=float(release.clip_norm),
        noise_std=float(release.noise_std),
    )


_ANSWERS: Mapping[type[SplitMessage], Callable[..., None]] = MappingProxyType(
    {
        say.EvidenceRequest: EnclaveServer._answer_evidence_request,
        say.HandshakeCall: EnclaveServer._answer_call,
        say.ClientEvidence: EnclaveServer._appraise_again,
        say.Upload: EnclaveServer._queue_upload,
        say.RepeatRequest: EnclaveServer._repeat_reply,
        say.RestoreRequest: EnclaveServer._restore_state,
        say.StateRequest: EnclaveServer._send_sealed_state,
        say.SettleRequest: EnclaveServer._settle_state,
        say.WeightsRequest: EnclaveServer._send_weights_digest,
        say.PermitRequest: EnclaveServer._prepare_release,
        say.AdaptersRequest: EnclaveServer._send_release,
        say.StatementRequest: EnclaveServer._state_transcript,
        ask.ClientReady: EnclaveServer._note_client_ready,
        ask.ClientTurn: EnclaveServer._begin_turn,
        ask.TurnDone: EnclaveServer._note_turn_done,
        ask.Conclude: EnclaveServer._begin_conclusion,
        ask.ConcludeReply: EnclaveServer._note_concluded,
        ask.ClientLeft: EnclaveServer._note_client_left,
        say.End: EnclaveServer._end_session,
    }
)
