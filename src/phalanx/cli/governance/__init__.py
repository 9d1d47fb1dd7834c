"""Commands that hold a run to a policy, hand it to strangers, and take a document out of it."""
