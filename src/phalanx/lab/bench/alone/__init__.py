"""One part by itself, as a program each: `python -m phalanx.lab.bench.alone.seal OUT.json`."""
