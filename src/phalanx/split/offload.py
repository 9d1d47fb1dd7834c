"""Where a masked split gives the enclave's frozen linear layers to somebody else; the one hook of that mode."""

from phalanx.errors import ConfigError
from phalanx.models import StageModule


def check_offload() -> None:
    """Return where this release can run a masked split.

    Raises:
        ConfigError: It cannot.
    """
    raise ConfigError(
        'split.mode = "masked": frozen layers are not given to a masked worker by the engine yet; '
        'set mode = "sealed", which keeps them in the enclave'
    )


def offload(back: StageModule) -> None:
    """Replace the frozen linear layers of the back part by masked ones.

    Raises:
        ConfigError: As `check_offload`.
    """
    check_offload()
    del back
