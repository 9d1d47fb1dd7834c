#!/usr/bin/env bash
# Two hospitals, an enclave and an owner: the commands of the tutorial, as they stand.
source "$(dirname "${BASH_SOURCE[0]}")/journey.sh"
page="$(dirname "${BASH_SOURCE[0]}")/../../../docs/tutorials/hospital.md"

script=$(sed -n '/^```sh$/,/^```$/{/^```/d;p}' "$page")
commands=$(grep -c "phalanx " <<<"$script")
set -E
trap 'wrong=$((wrong + 1)); printf "WRONG TURN %s: %s\n" "$wrong" "$BASH_COMMAND"' ERR
# shellcheck disable=SC1090 # the page's own commands
source <(printf '%s\n' "$script")
trap - ERR
leads_to owner/runs/run/report.html
arrive hospital
