"""The membership of parties: how they join, are measured, come back and leave."""
