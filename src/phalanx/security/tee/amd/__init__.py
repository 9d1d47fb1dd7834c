"""SEV-SNP: reports, and the chain of the chip's key."""
