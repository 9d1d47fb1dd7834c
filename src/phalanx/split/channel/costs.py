"""The costs of security for a process, part by part, in CPU seconds; torch-free."""

from typing import Annotated, NamedTuple

from pydantic import Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Costs(NamedTuple):
    """CPU seconds of one process, or of several, since they began.

    Attributes:
        digest_s: Digests of frames, which transcript and signed headers share, and of other messages.
        framing_s: The rest of packing and unpacking: buffers, headers, nonces, the chain of the transcript.
        signing_s: Signing and checking the transport's headers and receipts. TLS is not in it, nor anywhere but in
            `cpu_s`: it computes in threads of its own.
        meeting_s: Evidence, appraisals, tokens, keys, and checks whether the appraised party is still accepted.
    """

    cpu_s: Seconds = 0.0
    cipher_s: Seconds = 0.0
    digest_s: Seconds = 0.0
    framing_s: Seconds = 0.0
    signing_s: Seconds = 0.0
    meeting_s: Seconds = 0.0

    @property
    def link_s(self) -> float:
        """Packing and unpacking as a whole."""
        return self.cipher_s + self.digest_s + self.framing_s

    def add_costs(self, other: "Costs") -> "Costs":
        """Both together."""
        return Costs(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def subtract_costs(self, before: "Costs") -> "Costs":
        """What has been added since an earlier state."""
        return Costs(*(now - then for now, then in zip(self, before, strict=True)))
