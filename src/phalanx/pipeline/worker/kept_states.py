"""States on workers' disks: an owner that was killed gets them back before any party has a role."""

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.state_files import read_state, state_path
from phalanx.errors import CheckpointError, FrameError
from phalanx.pipeline.protocol.messages import Bulk, Fault, FetchBulk, parse_message
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver, Post, send_bulk
from phalanx.transport import Endpoint, LinkFault

_PATIENCE_S = 60.0


def fetch_kept(
    endpoint: Endpoint,
    party: str,
    stage: int,
    step: int,
    expected: Mapping[str, Tensor],
    *,
    patience_s: float = _PATIENCE_S,
) -> dict[str, Tensor]:
    """Ask a worker for the state of a stage that its process has kept on disk.

    Whether it is the verified state is for the caller to check: a worker can keep any bytes.

    Args:
        endpoint: The owner's; the worker has been set up and has no role yet.
        patience_s: Longest time without a further part of the answer.

    Raises:
        CheckpointError: The worker keeps no such state, is gone, sends something else, or says nothing for long.
    """
    request = FetchBulk(epoch=0, step=step, stage=stage, purpose="kept")
    endpoint.send_frame(party, request.kind, request.model_dump(mode="json"))
    receiver, heard = BulkReceiver(expected), time.monotonic()
    while time.monotonic() - heard < patience_s:
        frame = endpoint.receive_item(0.2)
        if isinstance(frame, LinkFault) and frame.peer == party:
            raise CheckpointError(f"stage {stage}: {party} is lost: {frame.error}")
        if frame is None or isinstance(frame, LinkFault) or frame.sender != party:
            continue
        try:
            message = parse_message(frame.kind, frame.body)
            if isinstance(message, Fault):
                raise CheckpointError(f"stage {stage}: {party} has no state of step {step}: {message.reason}")
            place = (request.purpose, request.stage, request.step)
            if not isinstance(message, Bulk) or (message.purpose, message.stage, message.step) != place:
                continue
            tensors = receiver.add_part(message.offset, message.total, frame.payload)
        except FrameError as exc:
            raise CheckpointError(f"stage {stage}: {party} sent a message that is not a state: {exc}") from exc
        heard = time.monotonic()
        if tensors is not None:
            return tensors
    raise CheckpointError(f"stage {stage}: {party} did not send its kept state within {patience_s:.0f} s")


def send_kept(post: Post, owner: str, about: FetchBulk, directory: Path | None, party: str) -> None:
    """A worker's answer: the state as its file has it."""
    if directory is None:
        raise CheckpointError("this worker saves no states; set a directory in its worker file: journal = DIR")
    state = read_state(state_path(directory, about.stage, party, about.step), about.step)
    send_bulk(post, owner, about, state, about.step)
