"""The laboratory: attacks, paths of honest parties, benches, tables of the paper. Only the command line imports it."""
