"""The cluster of a plan: devices, links, collectives, the catalogue that is shipped, this machine."""
