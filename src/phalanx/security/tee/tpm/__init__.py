"""TPM 2.0: quotes, enrolment, counters, and secrets that one machine state opens."""
