"""Keys, certificates and the audit log; nothing here loads torch."""
