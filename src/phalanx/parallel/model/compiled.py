"""Blocks compiled by torch's inductor, and whether this machine can do that."""

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.models import StageModule

_COMPILERS = ("g++", "clang++")


def why_no_compiler(device: str) -> str | None:
    """Say what inductor lacks on this machine; None where it has all. Nothing is compiled to find out.

    Args:
        device: "cpu" or "cuda", with or without a number.
    """
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; install it, or set compile to false"
        return None
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ((named,) if named else _COMPILERS)):
        return f"no C++ compiler: neither of {', '.join(_COMPILERS)} was found, and CXX names {named or 'none'}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Python's headers are not in {sysconfig.get_path('include')}; install them, or set compile to false"
    return None


def compile_blocks(stage: "StageModule") -> None:
    """Compile each block of a stage at its first call; blocks that are alike share the compiled code.

    Hooks of a block stay outside, so that copies which share parameters have gathered them before. Without gradients
    the block runs as it is: held-out batches are few, and of many shapes.
    """
    import torch  # noqa: PLC0415 - a question for a compiler needs none of it

    for block in stage.own_blocks:
        anything: Any = block
        plain = anything.forward
        compiled = torch.compile(plain, dynamic=False)
        anything.forward = functools.partial(_run_block, torch.is_grad_enabled, compiled, plain)


def _run_block(
    wants: Callable[[], bool], compiled: Callable[..., Any], plain: Callable[..., Any], *x: Any, **y: Any
) -> Any:
    return compiled(*x, **y) if wants() else plain(*x, **y)
