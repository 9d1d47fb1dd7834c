"""The answers of ``phalanx plan``: about layouts, cuts of a split, and stages of a run that goes on."""
