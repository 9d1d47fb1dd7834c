"""What the owner runs: steps to their verified end, failover, rollback, and the states that it collects."""
