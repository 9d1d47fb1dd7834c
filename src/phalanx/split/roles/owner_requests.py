"""What the owner of a split asks the enclave for, wherever the clients are."""

from torch import Tensor

from phalanx.split.channel import messages as say
from phalanx.split.channel.tensor_kinds import TensorKinds
from phalanx.split.handshake.party import EnclavePeer


class OwnerRequests:
    """The owner's requests: it keeps sealed states, and asks for the digest and for the release."""

    def __init__(self, owner: EnclavePeer) -> None:
        self._owner = owner

    def restore_state(self, step: int, blob: memoryview) -> None:
        """Have the enclave go on from a sealed state."""
        self._owner.connection.request_answer(say.RestoreRequest(step=step), say.RestoreReply, (blob,))

    def request_state(self) -> tuple[int, int, memoryview]:
        """Return finished steps, number and bytes of the sealed state."""
        state, blob = self._owner.connection.request_answer(say.StateRequest(), say.SealedState)
        return state.step, state.number, blob

    def settle_state(self, number: int) -> None:
        """A sealed state is safe: the ones before it are void."""
        self._owner.connection.request_answer(say.SettleRequest(number=number), say.SettleReply)

    def request_weights_digest(self) -> str:
        """Return the digest of the weights."""
        weighed, _ = self._owner.connection.request_answer(say.WeightsRequest(), say.WeightsReply)
        return weighed.digest

    def prepare_release(self) -> bool:
        """Have a release permitted and counted; return whether a state that counts it is kept already.

        Raises:
            ReleaseRefusedError: The policy lets nothing out.
        """
        prepared, _ = self._owner.connection.request_answer(say.PermitRequest(), say.ReleaseReply)
        return prepared.is_kept

    def request_release(self, step: int) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the permission and the adapters of a release that is permitted, and kept in a settled state."""
        self._owner.connection.send_message(say.AdaptersRequest())
        tensors: dict[str, Tensor] = {}
        while True:
            message, frame = self._owner.connection.await_one_of((say.ReleasePart, say.ReleaseEnd))
            if isinstance(message, say.ReleasePart):
                kind = TensorKinds.adapter_kind(message.name, message.shape)
                tensors[message.name] = self._owner.tensor_link.unpack_tensor(frame, kind, step, len(tensors))
            elif isinstance(message, say.ReleaseEnd):
                return message.release.model_dump(), tensors

    def end_session(self) -> None:
        """The session is over."""
        self._owner.connection.send_message(say.End())
        self._owner.connection.flush_messages()
