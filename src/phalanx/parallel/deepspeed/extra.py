"""The package deepspeed itself: whether it is there, and its kernels, which are compiled at their first use."""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from phalanx.errors import ConfigError

NAME = "deepspeed"
INSTALL = 'pip install "phalanx-train[deepspeed]"'
FIRST, BEYOND = (0, 19, 8), (0, 20)
"""Versions that this was written for, as the extra in pyproject.toml has them."""

_ADAM, _FILES = "CPUAdamBuilder", "AsyncIOBuilder"
_SHARED_MEMORY = "deepspeed_shm_comm"
_NEEDS = {_ADAM: "a C++ compiler", _FILES: "a C++ compiler, and libaio with its headers (Debian: libaio-dev)"}
_LAST = 300


def why_no_extra() -> str | None:
    """Say why the installed package cannot be used; None where it can. Nothing is imported."""
    try:
        installed = version(NAME)
    except PackageNotFoundError:
        return f"the package {NAME} is not installed; {INSTALL}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    if FIRST <= numbers < BEYOND:
        return None
    low, high = (".".join(map(str, numbers)) for numbers in (FIRST, BEYOND))
    return f"{NAME} {installed} is installed, and this was written for {low} and later below {high}; {INSTALL}"


@contextlib.contextmanager
def deepspeed_environment(device: str, local_rank: int) -> Iterator[None]:
    """Variables that deepspeed reads when it is imported, set up and used; they are put back afterwards.

    Args:
        device: "cpu" or "cuda", with or without a number.
        local_rank: Number of this rank on its machine.
    """
    variables = {
        "DS_ACCELERATOR": device.partition(":")[0],
        "LOCAL_RANK": str(local_rank),
        "PATH": _path_with_ninja(),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load_package() -> Any:
    """The package, without the kernel by which it would share memory between ranks; inside `deepspeed_environment`.

    Nothing here uses that kernel, and two runs of one user that have the same port would write into one segment.
    """
    package = importlib.import_module(NAME)
    importlib.import_module(f"{NAME}.ops").__compatible_ops__[_SHARED_MEMORY] = False
    return package


def drop_process_groups() -> None:
    """Drop the groups that the package keeps for itself, which end with the ranks that they were of."""
    comm: Any = importlib.import_module(f"{NAME}.comm.comm")
    comm.cdb = None
    importlib.import_module(f"{NAME}.utils.groups")._release_process_group_references()


def why_no_kernels(*, adam: bool, files: bool) -> str | None:
    """Say which kernel cannot be had on this machine, as deepspeed itself finds; None where all can; nothing is built.

    Args:
        adam: AdamW on the host is needed.
        files: Asynchronous reading and writing is needed.
    """
    for name, builder in _kernel_builders(adam=adam, files=files):
        if not builder.is_compatible():
            return f"its kernel {builder.NAME} does not go with this machine; it needs {_NEEDS[name]}"
    return None


def build_kernels(*, adam: bool, files: bool) -> None:
    """Compile missing kernels, minutes for the first run on a machine, into TORCH_EXTENSIONS_DIR.

    Args:
        adam: Whether the kernel of Adam is needed, as in `why_no_kernels`.
        files: Whether the kernel of files is needed, as in `why_no_kernels`.
    """
    for name, builder in _kernel_builders(adam=adam, files=files):
        try:
            builder.load(verbose=False)
        except (RuntimeError, OSError, ImportError) as exc:
            reason = " ".join(str(exc).split())[:_LAST]
            raise ConfigError(
                f"deepspeed: its kernel {builder.NAME} cannot be compiled: {reason}; it needs {_NEEDS[name]}"
            ) from exc


def _kernel_builders(*, adam: bool, files: bool) -> Iterator[tuple[str, Any]]:
    accelerator = importlib.import_module(f"{NAME}.accelerator").get_accelerator()
    for name, is_needed in ((_ADAM, adam), (_FILES, files)):
        if is_needed:
            yield name, accelerator.create_op_builder(name)


def _path_with_ninja() -> str:
    """The search path of programs; ninja comes as a package, and an interpreter does not add that package's folder."""
    path = os.environ.get("PATH", "")
    if shutil.which("ninja") is not None:
        return path
    try:
        folder = importlib.import_module("ninja").BIN_DIR
    except ImportError:
        return path
    return os.pathsep.join((str(folder), path))
