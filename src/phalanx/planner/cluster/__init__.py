"""What a step runs on: devices, links, collectives, the catalogue that is shipped, this machine."""
