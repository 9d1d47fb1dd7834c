"""Phalanx: train language models on machines you do not have to trust.

    import phalanx
    summary = phalanx.train(phalanx.load_run("run.toml"))

Importing this package loads no torch; the first use of ``train`` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.train import load_run, train

__version__ = "0.1.0"
__all__ = ["__version__", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name in ("load_run", "train"):
        import phalanx.train  # noqa: PLC0415 - torch is loaded only when training is asked for

        return getattr(phalanx.train, name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
