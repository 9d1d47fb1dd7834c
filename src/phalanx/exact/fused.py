"""Compiled loops for exact products, with the bits of the eager operations: ``python -m phalanx.exact`` builds.

Nothing is built unless that is called. The library is put into the user's cache directory, under the digest of its
source, and is loaded from there by later processes; without it products are made of torch's operations.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import ConfigError

_SOURCE = Path(__file__).with_name("fused.cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")


def locate_library() -> Path:
    """Return the place of the library of this source: ``$XDG_CACHE_HOME/phalanx``, or ``~/.cache/phalanx``."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "phalanx" / f"exact-{digest[:16]}.so"


def build_library() -> Path:
    """Compile the kernels with the C++ compiler ``$CXX``, or ``c++``.

    Raises:
        ConfigError: There is none, or it fails.
    """
    path, compiler = locate_library(), os.environ.get("CXX", "c++")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        out = Path(directory) / path.name
        try:
            subprocess.run(  # noqa: S603 - the user's own compiler and our own source
                [compiler, *_FLAGS, "-o", str(out), str(_SOURCE)], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as exc:
            raise ConfigError(
                f"{compiler}: {getattr(exc, 'stderr', None) or exc}; set CXX to a C++17 compiler, or do without: the "
                "bits are the same"
            ) from exc
        out.replace(path)
    open_kernels.cache_clear()
    return path


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class FusedKernels:
    """The functions of the library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._round, self._add = library.round_matrix, library.add_digits
        self._round.restype = self._add.restype = None

    def round_rows(self, x: Tensor, bits: int, num_digits: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """As `FixedPoint.round_rows` of a matrix with one unit stride: integers, digits and scale, in its layout."""
        by_columns = x.stride(1) != 1
        flat = x.mT if by_columns else x
        outer, inner = flat.shape
        integers = torch.empty(outer, inner, dtype=torch.float32)
        digits = torch.empty(num_digits, outer, inner, dtype=torch.int8)
        scale = torch.empty(len(x), 1, dtype=torch.float64)
        sizes, factors = torch.empty(inner, dtype=torch.int32), torch.empty(inner, dtype=torch.float32)
        sides = (outer, inner, flat.stride(0), bits, num_digits, by_columns)
        places = (_pointer(each) for each in (integers, digits, scale, sizes, factors))
        self._round(_pointer(flat), *map(ctypes.c_int64, sides), *places)
        turned = [integers.mT, *digits.mT] if by_columns else [integers, *digits]
        return turned[0], turned[1:], scale

    def scale_sum(self, runs: Iterable[list[Tensor]], num_runs: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write the scaled sum of runs, each of which is the products of all digits, to `out` ``[rows, columns]``."""
        rows, columns = out.shape
        total = torch.empty(rows if num_runs > 1 else 1, columns, dtype=torch.float64)
        left, right = left.contiguous(), right.contiguous()
        for number, parts in enumerate(runs):
            digits = 3 if len(parts) == 9 else 2
            array = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
            ends = (ctypes.c_int64(number == 0), ctypes.c_int64(number == num_runs - 1))
            sides = map(ctypes.c_int64, (digits, rows, columns))
            self._add(array, *sides, _pointer(left), _pointer(right), _pointer(total), *ends, _pointer(out))


@functools.cache
def open_kernels() -> FusedKernels | None:
    """The library, where it was built."""
    path = locate_library()
    try:
        return FusedKernels(path) if path.exists() else None
    except OSError:
        return None
