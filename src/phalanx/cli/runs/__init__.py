"""How runs are listed, compared, searched and interpreted from the command line."""
