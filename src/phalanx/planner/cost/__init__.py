"""What one layout takes: memory, seconds, bytes, money, schedules played through on paper."""
