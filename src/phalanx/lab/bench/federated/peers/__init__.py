"""Programs of an environment with NVFlare and Flower; they import nothing of this package."""
