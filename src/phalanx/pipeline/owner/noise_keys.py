"""The keys of the noise that hides single rows: given out with the roles of an epoch, and committed to in the log."""

from collections.abc import Collection

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import NoiseKeys
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.security.privacy import noise_commitment


def tell_noise_keys(
    facts: StepFacts, post: Post, new: Assignment, parties: Collection[str], epoch: int, step: int
) -> None:
    """Give each party the keys of an epoch's noise on the stages that it has, and commit to all of them.

    A step that is attempted again is in another epoch, and has other noise: where weights differ, two sums under one
    noise would have their difference bare.

    Args:
        facts: Have the secret; without one nothing is said.
        post: Sends a message.
        new: Holders and shadows of the epoch.
        parties: All that take part, the owner included.
        epoch: The epoch, which has just been announced to them.
        step: With which it begins.
    """
    keys = {stage: facts.noise_key(epoch, stage) for stage in sorted(new.holders)}
    known = {stage: key for stage, key in keys.items() if key is not None}
    if not known:
        return
    commitments = {str(stage): noise_commitment(key) for stage, key in known.items()}
    facts.observe("noise_committed", {"epoch": epoch, "step": step, "keys": commitments})
    for name in parties:
        stages = new.copies_of(name)
        payload = memoryview(b"".join(known[stage] for stage in stages))
        post(name, NoiseKeys(epoch=epoch, stages=stages), (payload,))
