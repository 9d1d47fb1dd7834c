"""Worker 1 lies about stage 1, and worker 2, its auditor, says the same."""

from phalanx.pipeline.messages import AuditReport, Commit, StepAudited
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, only, tampering
from phalanx.transport.tensors import tensor_buffers


def league_of_messages(direction):
    """Messages of one direction."""
    lies = {}

    def tamper(found, step, microbatch, tensor):
        if found != direction:
            return tensor
        lie = tensor * 1.5
        lies[(step, microbatch)] = digest_hex(tensor_buffers(lie.contiguous()))
        return lie

    def vouch(letter, report):
        lie = lies.get((report.step, report.microbatch))
        if report.stage != 1 or lie is None:
            return [letter]
        return [letter.saying({"digests": {**report.digests, direction: lie}})]

    return {1: Actor(tampering(tamper)), 2: Actor(rewrite=only(AuditReport, vouch))}


def league_of_gradients():
    """The weight gradient."""
    committed = []

    def note(letter, commit):
        committed.append((commit.gradient, commit.norm_squared))
        return [letter]

    def vouch(letter, audited):
        gradient, norm_squared = committed[-1]
        return [letter.saying({"gradient": gradient, "norm_squared": norm_squared})] if audited.stage == 1 else [letter]

    doubled = tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()})
    return {1: Actor(doubled, rewrite=only(Commit, note)), 2: Actor(rewrite=only(StepAudited, vouch))}
