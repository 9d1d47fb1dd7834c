"""The configuration of masking, and of a worker that multiplies masked numbers."""

from typing import Literal, Self

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.transport import JoiningWorkerConfig

HOST_AND_PORT = r"^([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[1-9][0-9]{0,4}$"
MAX_ROWS = 512
"""Most rows of a pad where the config names no number."""


class MaskedConfig(StrictModel):
    """The trusted side: where pads come from, how many are kept, which worker makes their products.

    Attributes:
        pads: ``aes`` draws pads from AES-256 in counter mode under a key that lives as long as the process; ``os``
            draws every pad from the operating system's generator, many times slower.
        rows: Rows of one request and of one pad. Longer inputs are cut, of shorter ones the rest of the pad is thrown
            away, and a pad costs a product of all its rows; left out, a split takes the tokens of its microbatches, in
            equal parts of at most `MAX_ROWS`.
        reserve: Pads of each product that are kept ready, made in idle time.
        late_pads: Make a pad while the step waits where none is ready; without it the step is refused.
        second_worker: Have a second worker make the pads' products; it must not talk to the first one.
        address: `host:port` at which the enclave of remote clients awaits its workers, which are processes of others;
            left out, a run starts them on the enclave's machine.
        bound: Euclidean length that no row of activations exceeds, for one scale of all rows; left out, each row has
            its own, which is never less accurate.
    """

    pads: Literal["aes", "os"] = "aes"
    rows: int | None = Field(default=None, ge=1, le=2**20)
    reserve: int = Field(default=2, ge=0, le=4096)
    late_pads: bool = True
    second_worker: bool = False
    bound: float | None = Field(default=None, gt=0)
    address: str | None = later_key(None, pattern=HOST_AND_PORT)

    def for_tokens(self, tokens: int) -> Self:
        """This config with rows for microbatches of so many tokens, where it names none itself."""
        if self.rows is not None:
            return self
        parts = -(-tokens // MAX_ROWS)
        return self.model_copy(update={"rows": -(-tokens // parts)})


class MaskedWorkerConfig(JoiningWorkerConfig):
    """The config of one worker process: its identity, the address of the trusted side, and its device."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """`cpu` multiplies in float64, `cuda` in limbs of 8 bits."""
    rejoins: bool = False
    """Whether it waits for the next session where one breaks off, as the enclave of remote clients does."""
    memory_mib: int | None = Field(default=None, ge=1, le=2**30)
    """Memory that it gives to matrices; left out, three quarters of what the machine has available when it joins."""
