#!/usr/bin/env bash
# Builds everything but the tests with each compiler that is here, with warnings as errors, and prints a table.
usage() {
  cat <<'TEXT'
scripts/compilers.sh [--syntax] [--tests] [COMPILER...]
  --syntax  checks without making code, in about half the time
  --tests   also the test programs
  COMPILER  such as g++-14 or clang++-19; without, each of g++-12 to g++-15 and
            clang++-16 to clang++-21 that is installed
TEXT
}
set -euo pipefail
cd "$(dirname "$0")/.."
syntax= tests=OFF compilers=()
for argument in "$@"; do
  case $argument in
    --syntax) syntax=yes ;;
    --tests) tests=ON ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "compilers.sh does not know $argument" >&2; usage >&2; exit 2 ;;
    *) compilers+=("$argument") ;;
  esac
done
if [ ${#compilers[@]} = 0 ]; then
  for name in g++-{12..15} clang++-{16..21}; do
    ! command -v "$name" >/dev/null || compilers+=("$name")
  done
fi
[ ${#compilers[@]} -gt 0 ] || { echo "none of the compilers is installed" >&2; exit 1; }

# check_syntax FOLDER: each unit by itself, with the command that would compile it
check_syntax() {
  local unit line failed=0
  for unit in $(ninja -C "$1" -t inputs all | grep '\.o$'); do
    line=$(ninja -C "$1" -t commands -s "$unit" | sed -E 's/ -MD -MT [^ ]+ -MF [^ ]+ -o [^ ]+ -c / -fsyntax-only /')
    (cd "$1" && eval "$line") || { echo "FAILED: $unit"; failed=1; }
  done
  return "$failed"
}

report=() status=0
for compiler in "${compilers[@]}"; do
  folder=build/compilers/$compiler began=$SECONDS result=ok
  mkdir -p "$folder"
  echo "== $compiler"
  {
    cmake -S . -B "$folder" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON \
      -DTESSERA_WARNINGS_AS_ERRORS=ON -DTESSERA_TESTS="$tests" -DCMAKE_DISABLE_PRECOMPILE_HEADERS="${syntax:-OFF}" &&
      if [ "$syntax" ]; then check_syntax "$folder"; else cmake --build "$folder" -- -k 0; fi
  } >"$folder/log" 2>&1 || { result="FAILED, see $folder/log" status=1; grep -E '(warning|error):' "$folder/log" | sort -u | head -n 20 || true; }
  report+=("$(printf '%-12s %-10s %5d s  %s' "$compiler" "$("$compiler" -dumpfullversion -dumpversion)" $((SECONDS - began)) "$result")")
done
printf '%s\n' "${report[@]}"
exit "$status"
