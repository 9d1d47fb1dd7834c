"""The enclave's process and the masked workers': files, starts, sandboxes."""
