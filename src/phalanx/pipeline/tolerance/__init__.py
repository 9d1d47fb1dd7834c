"""When two tensors count as equal: distance, drift, numeric class, and the screens that ask for an audit."""
