"""What attacks are tried on: this program's server, and its gateway before an engine with vLLM's open routes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parent))
