#!/usr/bin/env bash
# A cluster: a run of ranks is planned, trained, and gone on with on fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/journey.sh"

some_texts texts
type phalanx init cluster.toml --kind cluster --data texts --ranks 2
type phalanx plan cluster.toml --gpus 2
type phalanx train cluster.toml --dry-run
type phalanx launch cluster.toml --dry-run
type phalanx train cluster.toml --set train.steps=12
leads_to runs/cluster/report.html
# one machine was taken away: the checkpoint is cut for the ranks that are left; the run file says what one rank needs
type phalanx train cluster.toml --set train.steps=20 --set parallel.dp=1 --set parallel.zero=0 --resume
type phalanx checkpoint export runs/cluster model
leads_to model/config.json
type phalanx generate model --prompt "The parser" --max-new-tokens 8
arrive cluster
