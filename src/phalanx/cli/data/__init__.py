"""``phalanx data``: build a dataset, look at it, check it, compare two; one file a group of verbs."""
