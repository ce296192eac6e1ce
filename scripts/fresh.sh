#!/usr/bin/env bash
# Runs the commands of the README as a new user meets them: in a fresh Debian with nothing but git, Python and sudo, in a clone of what is
# committed here, with an account of its own. Says at the end how long each took.
usage() {
  cat <<'TEXT'
scripts/fresh.sh [12 | 13]... [--folder FOLDER] [--keep] [-- COMMAND...]
  12 13            the versions of Debian; both if none is named
  --folder FOLDER  where the Debians are made, 6 GB each; a temporary folder
                   if none is given
  --keep           leave them there; otherwise they are removed
  COMMAND          what to run, one line an argument: ./quickstart and then
                   ./check if none is given
Needs root. Takes the package mirror of this machine's apt, and the proxies and
package indexes of its apt, pip and environment.

Examples:
  scripts/fresh.sh
  scripts/fresh.sh 13 -- ./quickstart
TEXT
}
set -euo pipefail
wrong() { printf '%s\n' "$1" >&2; usage >&2; exit 2; }

versions=() folder= keep= commands=(./quickstart ./check)
while [ $# -gt 0 ]; do
  case $1 in
    12 | 13) versions+=("$1") ;;
    --folder) [ $# -gt 1 ] || wrong "--folder needs a folder"; folder=$2; shift ;;
    --keep) keep=yes ;;
    --) shift; [ $# -gt 0 ] || wrong "-- needs commands behind it"; commands=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    *) wrong "fresh.sh does not know $1" ;;
  esac
  shift
done
[ ${#versions[@]} -gt 0 ] || versions=(12 13)
. "$(dirname "$0")/debian.sh"

report=() status=0
for version in "${versions[@]}"; do
  root=$folder/debian-$version
  [ ! -e "$root" ] || fail "$root is there already. A fresh Debian needs a new folder: remove it, or name another one with --folder."
  roots+=("$root")
  begin=$SECONDS
  debian "$version" "$root"
  report+=("Debian $version: installed in $((SECONDS - begin)) s")
  for line in "${commands[@]}"; do
    printf '\n== Debian %s: %s\n' "$version" "$line"
    begin=$SECONDS
    if inside "$root" "$line"; then
      report+=("Debian $version: $line took $((SECONDS - begin)) s")
    else
      status=$?
      report+=("Debian $version: $line FAILED after $((SECONDS - begin)) s, status $status")
      break
    fi
  done
done
printf '\n'
printf '%s\n' "${report[@]}"
exit "$status"
