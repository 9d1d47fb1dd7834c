#!/usr/bin/env bash
# A laptop: from a folder with a space in its name to a model that goes on with a text.
source "$(dirname "${BASH_SOURCE[0]}")/journey.sh"

some_texts "my texts"
type phalanx doctor
type phalanx init "my first.toml" --kind scratch --data "my texts"
type phalanx train "my first.toml" --dry-run
type phalanx train "my first.toml" --set train.steps=24
leads_to "runs/my first/report.html"
# it was too short, and goes on where it ended
type phalanx train "my first.toml" --set train.steps=32 --resume
type phalanx audit verify "runs/my first"
type phalanx checkpoint export "runs/my first" "my model"
leads_to "my model/tokenizer.json"
type phalanx generate "my model" --prompt "The parser" --max-new-tokens 8
arrive laptop
