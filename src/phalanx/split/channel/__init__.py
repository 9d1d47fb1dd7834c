"""The channel between client and enclave: tensors, frames, messages and repetitions."""
