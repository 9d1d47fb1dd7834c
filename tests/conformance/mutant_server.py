"""A process that has imported what every test needs but Phalanx, and runs single tests in forks of itself.

``python mutant_server.py`` reads a request a line from stdin: a JSON array of the folder that holds the package to be
tested, the test, a file for its output, and the seconds that the test may take. It answers each with the exit status of
pytest.
"""

import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "cryptography.x509",
    "pydantic",
    "numpy",
    "grpc",
)


def _run(package_parent: str, test: str, output: str, limit_s: float) -> None:
    """Be the process of one test, to its end."""
    status = 3
    try:
        with Path(output).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["PYTHONPATH"] = package_parent
        sys.path.insert(0, package_parent)
        import pytest

        # of plugins of pytest's that are imported already, asserts say less: nobody reads these
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "", "-o", f"timeout={limit_s}")
        status = int(pytest.main([*quiet, *options, test]))
    except BaseException:  # noqa: BLE001 - whatever it is, the file of the output tells it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve until stdin ends.

    Raises:
        RuntimeError: Something that a fork must not inherit is here: Phalanx itself, or a second thread.
    """
    os.chdir(ROOT)
    for name in _IMPORTED:
        importlib.import_module(name)
    if "phalanx" in sys.modules or threading.active_count() > 1:
        raise RuntimeError("a fork would test the Phalanx that its parent has imported, or lack its threads")
    for line in sys.stdin:
        package_parent, test, output, limit_s = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(package_parent, test, output, limit_s)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
