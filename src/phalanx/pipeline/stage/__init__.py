"""One copy of one stage: module, optimizer, norm, undo, and the same work in a wider type."""
