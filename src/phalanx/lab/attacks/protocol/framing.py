"""Accuse an honest stage: the shadow claims that another tensor is the right one."""

from phalanx.lab.attacks.copies import honest_part
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.pipeline import StageCopy


class FramingAuditor(SignFlip):
    """Serves its own stages honestly; as an auditor it claims, and shows when asked, the negated tensor."""

    what = "framing"

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        """Put a liar in the place of each copy that the party audits with."""
        return honest_part(copy) if held else self.make_lying_copy(copy)
