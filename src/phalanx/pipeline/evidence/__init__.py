"""What a verdict rests on: written to files, read and judged again offline."""
