"""Worker processes of this machine: the fork server, memory, the allocator."""
