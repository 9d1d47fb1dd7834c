"""What proves that an applied step was audited, and how that is checked from the audit log alone."""
