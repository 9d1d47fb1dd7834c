# What the journeys of four new users share. Sourced; counts commands that were typed and those that were wrong turns.
#
# A wrong turn is a command that a user types as a page, a help text or the line printed before says, and that fails.
set -u
commands=0 wrong=0

# type COMMAND...: what the user types, in the directory that the journey is in
type() {
  commands=$((commands + 1))
  printf '$ %s\n' "$*"
  "$@" && return
  wrong=$((wrong + 1))
  printf 'WRONG TURN %s: %s\n' "$wrong" "$*"
}

# leads_to FILE: a step of the journey came to what it was made for
leads_to() {
  [[ -s $1 ]] && return
  wrong=$((wrong + 1))
  printf 'WRONG TURN %s: there is no %s\n' "$wrong" "$1"
}

arrive() {
  printf 'journey %s: %s commands, %s wrong turns\n' "$1" "$commands" "$wrong"
  exit $((wrong > 1))
}

some_texts() {
  mkdir -p "$1"
  for module in argparse json logging re typing unittest; do python3 -m pydoc "$module" >"$1/$module.txt"; done
}
