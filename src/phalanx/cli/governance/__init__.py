"""Commands about what a run may do and hand over: policies, passports, erasure."""
