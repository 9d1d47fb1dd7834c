"""The parties of a split: client, enclave, the enclave's server, the driver outside, a simulator of all."""
