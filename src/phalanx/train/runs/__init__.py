"""The four kinds of runs that a run file describes, each with the sections and checks that it has."""
