"""The step of a rank with differential privacy: gradients of single rows, clipped, summed, with noise."""
