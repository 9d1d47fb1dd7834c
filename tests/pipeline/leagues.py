"""Worker 1 lies about stage 1, and worker 2, its auditor, says the same."""

from phalanx.pipeline.protocol.messages import AuditReport, Commit, StepAudited
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, rewrite_only, tampering
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

    def vouch(outgoing, report):
        lie = lies.get((report.step, report.microbatch))
        if report.stage != 1 or lie is None:
            return [outgoing]
        return [outgoing.with_fields({"digests": {**report.digests, direction: lie}})]

    return {1: Actor(tampering(tamper)), 2: Actor(rewrite=rewrite_only(AuditReport, vouch))}


def league_of_gradients(liar=1, accomplice=2):
    """The weight gradient of stage 1; each is the number of a worker that has a copy of it."""
    committed = []

    def note(outgoing, commit):
        if commit.stage == 1:
            committed.append((commit.gradient, commit.norm_squared))
        return [outgoing]

    def vouch(outgoing, audited):
        gradient, norm_squared = committed[-1]
        return (
            [outgoing.with_fields({"gradient": gradient, "norm_squared": norm_squared})]
            if audited.stage == 1
            else [outgoing]
        )

    double = tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()})

    def double_stage_1(copy, held):
        return double(copy, held) if copy.spec.index == 1 else copy

    told = Actor(double_stage_1, rewrite=rewrite_only(Commit, note))
    return {liar: told, accomplice: Actor(rewrite=rewrite_only(StepAudited, vouch))}
