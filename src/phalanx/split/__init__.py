"""Split fine-tuning: what an enclave does itself, and what others do for it without seeing it."""
