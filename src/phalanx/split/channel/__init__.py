"""The channel between client and enclave: tensors, frames, messages, and what is sent again."""
