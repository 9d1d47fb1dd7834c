"""The tolerance between tensors: distance, drift, numeric class, and the screens that ask for an audit."""
