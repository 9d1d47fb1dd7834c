"""``python -m phalanx`` and ``torchrun -m phalanx`` are the same entry as ``phalanx``."""

from phalanx.cli import main

if __name__ == "__main__":
    main()
