"""The bench of federated rounds: ours beside NVFlare's and Flower's, in the same minutes and on the same rows."""
