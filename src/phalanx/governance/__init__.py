"""What a run hands to others: its passport, the erasure of a document, and states that strangers recompute from."""
