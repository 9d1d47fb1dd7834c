"""The ``[deepspeed]`` section: DeepSpeed's ZeRO in the place of torch's, and its offloading; imports no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel

Home = Literal["none", "cpu", "nvme"]

ALL_IS_SHARED = 3
"""The ZeRO level at which parameters are shared out too."""


class AioConfig(StrictModel):
    """The way in which a rank reads and writes its directory.

    Attributes:
        block_bytes: Bytes of one request to the disk. What is smaller than this, and than 1 MiB, stays in memory.
        queue_depth: Requests that are under way at once.
        threads: Threads that share one tensor.
        single_submit: Requests are handed over one by one instead of as many as the queue takes.
        overlap_events: Further requests are handed over while finished ones are awaited.
    """

    block_bytes: int = Field(default=2**20, ge=4096, le=2**30, multiple_of=4096)
    queue_depth: int = Field(default=8, ge=1, le=4096)
    threads: int = Field(default=1, ge=1, le=64)
    single_submit: bool = False
    overlap_events: bool = True


class DeepSpeedConfig(StrictModel):
    """The state that DeepSpeed shares out among the copies, and that it keeps outside the device's memory.

    Attributes:
        zero: State that the copies share instead of each having it: 1 optimizer state, 2 gradients too, 3 parameters
            too.
        offload_optimizer: Home of fp32 weights, both moments and gradients of the update, where the update is made:
            "none" is the device, "cpu" the host's memory, "nvme" files in `directory`; the last with zero 3.
        offload_parameters: Home of each copy's share of the parameters between uses; with zero 3, and the optimizer
            offloaded too.
        directory: Existing directory for files on a local disk, on every machine. Each rank has a folder in it while
            the run lasts.
        update_at_once: Numbers of a rank's share that the optimizer updates at once. With "nvme" so many are in the
            host's memory at a time, 16 bytes each.
        aio: Settings of reading and writing files.
    """

    zero: Literal[1, 2, 3] = 3
    offload_optimizer: Home = "none"
    offload_parameters: Home = "none"
    directory: str | None = Field(default=None, min_length=1)
    update_at_once: int = Field(default=25_000_000, ge=1024)
    aio: AioConfig = AioConfig()

    @model_validator(mode="after")
    def _check_homes(self) -> Self:
        if self.offload_parameters != "none" and self.zero < ALL_IS_SHARED:
            raise ValueError(
                f'offload_parameters = "{self.offload_parameters}" needs zero = 3, found {self.zero}: below it every '
                'rank has all parameters; set zero to 3, or offload_parameters to "none"'
            )
        if self.offload_parameters != "none" and self.offload_optimizer == "none":
            raise ValueError(
                f'offload_parameters = "{self.offload_parameters}" leaves the optimizer\'s state on the device, which '
                'is three times as large; set offload_optimizer to "cpu" or "nvme" too'
            )
        if self.offload_optimizer == "nvme" and self.zero < ALL_IS_SHARED:
            raise ValueError(
                f'offload_optimizer = "nvme" needs zero = 3, found {self.zero}: below it DeepSpeed keeps the state in '
                'the host\'s memory without a word; set zero to 3, or offload_optimizer to "cpu"'
            )
        self._check_files()
        return self

    def _check_files(self) -> None:
        if self.uses_disk and self.directory is None:
            raise ValueError('"nvme" needs directory, a folder on a local disk; add it')
        if not self.uses_disk and self.directory is not None:
            raise ValueError('directory has no meaning without "nvme"; remove it')
        if not self.uses_disk and self.aio != AioConfig():
            raise ValueError('aio has no meaning without "nvme"; remove it')

    @property
    def uses_disk(self) -> bool:
        """Whether anything is kept in files."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of files for each number that is trained, all ranks together."""
        state = 16 if self.offload_optimizer == "nvme" else 0
        return state + (4 if self.offload_parameters == "nvme" else 0)
