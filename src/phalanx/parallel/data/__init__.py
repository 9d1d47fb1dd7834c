"""Data parallel copies: which parameters a rank has, how copies join, update and gather them."""
