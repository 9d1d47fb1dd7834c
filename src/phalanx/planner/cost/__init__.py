"""The cost of one layout: memory, seconds, bytes, money, schedules played through on paper."""
