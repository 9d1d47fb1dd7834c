"""How tests say that something is refused."""

import pytest

from phalanx.errors import RefusedEvidenceError


def refusal(act) -> str:
    """The reason for which an act is refused; a test fails where it is not, or by any other error."""
    with pytest.raises(RefusedEvidenceError) as caught:
        act()
    assert caught.value.detail
    return str(caught.value.reason)
