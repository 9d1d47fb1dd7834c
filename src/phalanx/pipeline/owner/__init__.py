"""The owner's part of a verified pipeline: steps to their verified end, failover, rollback, collected states."""
