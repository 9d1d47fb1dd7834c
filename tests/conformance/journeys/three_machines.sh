#!/usr/bin/env bash
# Three machines: an owner invites two volunteers, who join with one line each.
source "$(dirname "${BASH_SOURCE[0]}")/journey.sh"
port=${1:-7070}

mkdir owner alice bob
some_texts owner/texts
in_() { (cd "$1" && "${@:2}"); }
type in_ owner phalanx init shared.toml --kind remote --data texts --workers alice,bob
sed -i "s/7070/$port/" owner/shared.toml
(cd owner && exec phalanx invite shared.toml --name alice --name bob --host 127.0.0.1 >invitations.txt) &
invited=$!
until grep -q "waiting for all to join" owner/invitations.txt 2>/dev/null; do
  kill -0 "$invited" || { type false "phalanx invite ended early"; arrive three_machines; }
  sleep 1
done
for name in alice bob; do
  line=$(grep -A 1 "^$name:" owner/invitations.txt | sed -n 's/.*phalanx join //p')
  port=$((port + 1)) commands=$((commands + 1))
  (cd $name && exec phalanx join "$line" --port "$port" >terminal.txt 2>&1) &
done
type wait "$invited"
type in_ owner phalanx train shared.toml --set train.steps=12
leads_to owner/runs/shared/report.html
type wait
type in_ owner phalanx peers runs/shared
type in_ owner phalanx audit verify runs/shared
type in_ owner phalanx checkpoint export runs/shared model
type in_ owner phalanx generate model --prompt "The parser" --max-new-tokens 8
arrive three_machines
