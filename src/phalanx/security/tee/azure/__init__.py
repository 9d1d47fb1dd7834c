"""Azure's confidential VMs: a hardware report that vouches for the key of a vTPM, and that vTPM's quote."""
