"""Every error that Phalanx raises on purpose, in one tree.

    PhalanxError                      exit code 1
    ├── ReasonedError                               mixed into those with one word for programs
    ├── ConfigError                             2   a run or worker file is wrong
    ├── InputError                              3   something on disk is wrong
    │   ├── DataError                               text, tokenizer, packed data
    │   ├── ModelError                              model directory, slicing, adapters
    │   ├── CheckpointError                         shard, manifest, resume
    │   ├── NoEvidenceError                         this machine gives no attestation evidence
    │   └── DiskError                               full, read-only or broken: a log cannot be kept
    ├── TransportError                          4   a peer or a link is wrong
    │   ├── FrameError                              malformed: truncated, over-long, mistyped
    │   │   └── OutOfBoundsError                        a field has a value that nothing can have
    │   ├── OrderError                              replayed, skipped or out of order
    │   ├── SealError                               a sealed frame is not the one that is due
    │   ├── UpdateRefusedError                      a site's update is not let into a round
    │   ├── PeerRefusedError                        unknown, expired, evicted or foreign identity
    │   └── PeerLostError                           gone, or silent beyond the deadline
    │       └── PeerGoneError                       no process listens at its address
    ├── VerificationError                       5   a claim, a log or a proof does not hold
    │   ├── CertificateError                        wrong, expired or foreign certificate
    │   ├── PadError                                a one-time pad cannot be shown to be fresh
    │   ├── WrongProductError                       a worker's product of masked numbers is not the product
    │   ├── SignatureError                          a signature does not match
    │   ├── AuditLogError                           the audit log is broken
    │   │   └── CutLogError                             others know lines of it that it lacks
    │   ├── EvidenceError                           an evidence file does not hold up
    │   ├── IsolationError                          a process cannot be kept apart as it must be
    │   ├── RefusedEvidenceError                    attestation evidence was appraised and refused
    │   ├── TpmError                                a TPM is absent, refuses, or keeps a secret
    │   ├── RollbackError                           a counter or a sealed state went back in time
    │   ├── TranscriptError                         two ends of a sealed channel saw different frames
    │   ├── ReleaseRefusedError                     the policy keeps an update sealed
    │   ├── AggregationError                        a secure sum, or a message of it, is refused
    │   ├── PolicyError                             a clause of a policy is broken, or the policy is not as signed
    │   │   └── RoleError                           a person lacks a role, or a second person has not approved
    │   ├── KeyFileError                            the file of API keys is missing, altered or older than before
    │   └── StaleReplicaError                       a copy is from another step: no verdict possible
    └── TrainingError                           6   training cannot go on
        ├── PrivacyBudgetError                      the privacy budget of a run pays for no further step
        ├── RewardError                             a reward of a text fails, hangs or is no finite number
        ├── StaleRolloutsError                      texts were written by weights that do not hold
        ├── NonFiniteLossError                      honest recomputation gave NaN or infinity
        │   └── FailedBatchError                            with this batch; the next one can be tried
        │       ├── FailedRoundError                        too few sites gave an update; the round can be asked again
        │       └── SpikeError                              loss or gradient is far above those of the steps before
        ├── FixedPointError                         a number does not fit into fixed point
        └── NoHolderError                           no party is left that holds a stage

Other exit codes: 0 success, 1 a bug in Phalanx (traceback), 130 interrupted by the user.

Every error has a code, such as PHX-C005, by which ``phalanx explain`` finds its page. A class has one; where the same
class stands for mistakes with different cures, the place that raises the error names a narrower one with `about`.
"""

import errno
import os
import traceback
from typing import Self

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BROKEN = frozenset({errno.EROFS, errno.EIO})
_CLOSED = frozenset({errno.EACCES, errno.EPERM})


def describe_fault(fault: BaseException) -> str:
    """Return kind and place of a fault without its message, which may quote texts of clients."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    frames = traceback.extract_tb(fault.__traceback__)[-3:]
    places = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(fault).__name__} at {places}"


class PhalanxError(Exception):
    """Root of the tree; catch it to catch everything that Phalanx raises on purpose.

    Attributes:
        exit_code: Of the process that ends with it.
        code: By which ``phalanx explain`` finds the page of the class.
    """

    exit_code = 1
    code = "PHX-A001"

    def __init_subclass__(cls, code: str = "", exit_code: int = 0) -> None:
        super().__init_subclass__()
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

    @property
    def error_facts(self) -> dict[str, str]:
        """What a program may want to know beside the message; the code may be narrower than that of the class."""
        return {"code": self.code, **self.__dict__.get("_facts", {})}

    def with_facts(self, **facts: str) -> Self:
        """Add facts, of `FACTS`; return the error itself."""
        self.__dict__["_facts"] = {**self.__dict__.get("_facts", {}), **facts}
        return self


FACTS = ("code", "file", "key", "found", "expected", "do")


class ReasonedError(PhalanxError):
    """An error with one word for programs beside the text for people; mixed into errors of other kinds.

    Attributes:
        reason: One word, a member of the enumeration that the class names.
        detail: What was found and expected.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class ConfigError(PhalanxError, code="PHX-C001", exit_code=2):
    """A run or worker file is wrong: unknown key, wrong type, impossible combination."""


class InputError(PhalanxError, code="PHX-I001", exit_code=3):
    """A file or directory is missing, malformed or altered, or the disk fails."""


class DataError(InputError, code="PHX-I010"):
    """Text, tokenizer or packed data is missing or malformed."""


class ModelError(InputError, code="PHX-I030"):
    """A model directory cannot be read, sliced or adapted."""


class CheckpointError(InputError, code="PHX-I050"):
    """A checkpoint is missing, damaged, foreign or from another run."""


class NoEvidenceError(InputError, code="PHX-I070"):
    """This machine gives no attestation evidence of the requested kind, or the evidence cannot be used."""


class DiskError(InputError, code="PHX-I080"):
    """A log cannot be read from or written to the disk; the log itself is intact."""


class TransportError(PhalanxError, code="PHX-T001", exit_code=4):
    """A peer or the link to it misbehaves."""


class FrameError(TransportError, code="PHX-T010"):
    """A frame is malformed: truncated, over-long or of the wrong type."""


class OutOfBoundsError(FrameError, code="PHX-T011"):
    """A message has all its fields, of the right types, and a value in one that nothing can have."""


class OrderError(TransportError, code="PHX-T020"):
    """A frame was replayed, skipped or arrived out of order."""


class SealError(TransportError, ReasonedError, code="PHX-T030"):
    """A frame is not the one due, or its channel is closed; `reason` is of `phalanx.security.seal.SealRefusal`."""


class UpdateRefusedError(TransportError, ReasonedError, code="PHX-T035"):
    """A site's update is not let into a round; `reason` is of `phalanx.federated.admission.UpdateRefusal`."""


class PeerRefusedError(TransportError, code="PHX-T040"):
    """A peer is unknown, evicted, or not the party that it claims to be."""


class PeerLostError(TransportError, code="PHX-T050"):
    """A peer is gone, or was silent beyond its deadline."""


class PeerGoneError(PeerLostError, code="PHX-T051"):
    """No process listens at a peer's address: its process has ended, or has not begun."""


class VerificationError(PhalanxError, code="PHX-V001", exit_code=5):
    """A claim, a log or a proof does not hold."""


class CertificateError(VerificationError, code="PHX-V010"):
    """A certificate is wrong, expired or signed by another authority."""


class PadError(VerificationError, code="PHX-V020"):
    """A one-time pad cannot be shown to be fresh, so nothing may be masked with it."""


class WrongProductError(VerificationError, code="PHX-V030"):
    """A worker's answer is not the product of the masked numbers that it was sent."""


class SignatureError(VerificationError, code="PHX-V040"):
    """A signature does not match the signed bytes."""


class AuditLogError(VerificationError, code="PHX-V050"):
    """The audit log was altered, truncated or reordered."""


class CutLogError(AuditLogError, code="PHX-V051"):
    """The audit log lacks lines that a party of the run knows, by the owner's own signature."""


class EvidenceError(VerificationError, code="PHX-V060"):
    """An evidence file does not prove its verdict."""


class IsolationError(VerificationError, code="PHX-V070"):
    """A process cannot be kept apart from others as is required, so nothing was run in it."""


class RefusedEvidenceError(VerificationError, ReasonedError, code="PHX-V080"):
    """Attestation evidence was appraised and refused; `reason` is of `phalanx.security.tee.RefusedEvidenceReason`."""


class TpmError(VerificationError, code="PHX-V090"):
    """A TPM cannot be reached, refuses a command, or keeps a secret because the machine's state is another one.

    Attributes:
        response: The TPM's response code; 0 where it did not answer.
    """

    def __init__(self, message: str, response: int = 0) -> None:
        super().__init__(message)
        self.response = response


class RollbackError(VerificationError, code="PHX-V100"):
    """A counter, an epoch or a sealed state is older than one that was already used."""


class TranscriptError(VerificationError, code="PHX-V110"):
    """The two ends of a sealed channel did not see the same frames, or a statement about them is malformed."""


class ReleaseRefusedError(VerificationError, ReasonedError, code="PHX-V120"):
    """The release policy keeps an update sealed; `reason` is of `phalanx.security.seal.ReleaseRefusal`."""


class PolicyError(VerificationError, code="PHX-V170"):
    """A clause of the organisation's policy is broken, or its signature does not hold."""


class RoleError(PolicyError, code="PHX-V171"):
    """A person lacks the role that a command, a call or a read needs, or a second person has not approved."""


class AggregationError(VerificationError, ReasonedError, code="PHX-V140"):
    """A secure sum or one of its messages is refused; `reason` is of `phalanx.security.aggregate.SumRefusal`.

    Attributes:
        culprit: The client that is at fault by its own signature; empty where there is none.
    """

    def __init__(self, reason: str, detail: str = "", culprit: str = "") -> None:
        super().__init__(reason, detail)
        self.culprit = culprit


class KeyFileError(VerificationError, code="PHX-V150"):
    """The file of API keys was not signed by the operator, is older than one that was read, or does not take a key."""


class StaleReplicaError(VerificationError, code="PHX-V130"):
    """The copy and the claim are from different optimizer steps: no verdict on the peer is possible."""


class TrainingError(PhalanxError, code="PHX-R001", exit_code=6):
    """Training cannot go on."""


class NonFiniteLossError(TrainingError, code="PHX-R010"):
    """The loss or a gradient is NaN or infinite although every stage was honest."""


class FailedBatchError(NonFiniteLossError, code="PHX-R011"):
    """One batch gives a loss or a gradient that is NaN or infinite; nothing was updated with it."""


class FailedRoundError(FailedBatchError, code="PHX-R012"):
    """Too few sites gave an update in a federated round; nothing of it was applied, and it can be asked for again."""


class SpikeError(FailedBatchError, code="PHX-R013"):
    """Loss or gradient norm of a batch is far above the steps before it; nothing was updated with it.

    Attributes:
        loss: Mean over the batch's targets, in nats.
        gradient_norm: Norm of the whole gradient before clipping.
    """

    def __init__(self, message: str, loss: float = float("nan"), gradient_norm: float = float("nan")) -> None:
        super().__init__(message)
        self.loss, self.gradient_norm = loss, gradient_norm


class RewardError(TrainingError, code="PHX-R040"):
    """A reward of a sampled text fails, takes too long, or is no finite number."""


class PrivacyBudgetError(TrainingError, code="PHX-R050"):
    """The privacy budget of a run does not pay for another step."""


class StaleRolloutsError(TrainingError, code="PHX-R041"):
    """The texts of a step were written by weights that were undone afterwards."""


class FixedPointError(TrainingError, code="PHX-R020"):
    """A number does not fit into fixed point: not finite, or beyond the bound that the scale was chosen for."""


class NoHolderError(TrainingError, code="PHX-R030"):
    """No party is left that holds a stage's weights."""


def is_disk_fault(exc: OSError) -> bool:
    """Return whether the disk is full, read-only or broken; a permission or a wrong path is none."""
    return exc.errno in _FULL | _BROKEN


def is_closed(exc: OSError) -> bool:
    """Return whether the operation failed because this user lacks a permission, or no file can have that name."""
    return exc.errno in _CLOSED | {errno.ENAMETOOLONG}


def writing_cure(exc: OSError) -> str:
    """Return what to do about a file that could not be written, by the reason that the operating system gives."""
    if exc.errno in _FULL:
        return "free space, or give another path"
    if exc.errno in _BROKEN:
        return "give a path on another disk"
    return "change its permissions, or give another path" if exc.errno in _CLOSED else "give another path"
