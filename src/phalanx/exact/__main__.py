"""``python -m phalanx.exact``: compile the kernels of `fused.py` into the user's cache directory."""

import sys

from phalanx.exact.fused import build_library

sys.stdout.write(f"{build_library()}\n")
