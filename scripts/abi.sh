#!/usr/bin/env bash
# Compares what two installations of Tessera give to programs: layouts of public classes, symbols of functions, libraries.
usage() {
  cat <<'TEXT'
scripts/abi.sh OLD NEW
  OLD, NEW  folders with include/tessera and lib, as `cmake --install` makes
            them and as archives and wheels contain them
Says what programs that were built with OLD miss in NEW, and ends with status 1
if there is anything. TESSERA_TORCH names the libtorch whose headers are
needed; build/python's unless given. Needs abidw and abidiff (the Debian
package abigail-tools). Takes some minutes and 4 GB of memory.
TEXT
}
set -euo pipefail
fail() { printf '%s\n' "$@" >&2; exit 2; }
case ${1:-} in -h | --help) usage; exit 0 ;; esac
[ $# = 2 ] || { usage >&2; exit 2; }
for tool in abidw abidiff nm c++filt; do
  command -v $tool >/dev/null || fail "$tool is missing; on Debian, apt-get install abigail-tools binutils."
done
root=$(cd "$(dirname "$0")/.." && pwd)
torch=${TESSERA_TORCH:-$(echo "$root"/build/python/lib/python3*/site-packages/torch)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# libraries PREFIX: their names and paths
libraries() { find "$1"/lib*/ -name 'libtessera*.so' ! -path "$1/lib*/tessera/*" ! -name '*_cli_*' -printf '%f %p\n' | sort; }

# Programs know the layouts from the headers, which are compiled here with debug information: released libraries have none.
describe() {
  local name=$1 prefix=$2 header text="int of_the_abi() { return 0; }"$'\n'
  [ -n "$(libraries "$prefix")" ] || fail "$prefix has no lib/libtessera.so; name a folder that cmake --install has filled."
  [ -e "$prefix/include/tessera/tessera.h" ] || fail "$prefix has no include/tessera/tessera.h; name a folder that cmake --install has filled."
  for header in tessera.h models.h vision.h extending.h xla/init.h; do
    [ ! -e "$prefix/include/tessera/$header" ] || text+="#include <tessera/$header>"$'\n'
  done
  "${CXX:-g++}" -std=c++20 -g -fno-eliminate-unused-debug-types -fPIC -shared -w -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DNDEBUG -I"$prefix/include" \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -Wl,--unresolved-symbols=ignore-all -x c++ - -o "$folder/$name.so" <<<"$text" ||
    fail "The headers of $prefix do not compile with the libtorch in $torch; name its own by TESSERA_TORCH."
  abidw --load-all-types --drop-private-types --headers-dir "$prefix/include/tessera" --no-corpus-path --out-file "$folder/$name.abi" "$folder/$name.so"
  while read -r _ library; do nm -D --defined-only "$library" | awk '{print $3}'; done < <(libraries "$prefix") | grep -E '^_Z[A-Z]*7tessera' | sort -u \
    >"$folder/$name.symbols"
}

describe old "$1"
describe new "$2"
status=0
missing=$(comm -23 <(libraries "$1" | cut -d' ' -f1) <(libraries "$2" | cut -d' ' -f1))
[ -z "$missing" ] || { printf 'missing libraries:\n%s\n' "$missing"; status=1; }

# Functions that headers name are those that programs call; all others are the library's own.
called=() own=0
while IFS= read -r function; do
  name=${function%%(*}
  name=${name##*::}
  if [ -n "$name" ] && grep -rqwF -- "$name" "$1/include/tessera"; then called+=("$function"); else own=$((own + 1)); fi
done < <(comm -23 "$folder/old.symbols" "$folder/new.symbols" | c++filt)
[ ${#called[@]} = 0 ] || { printf 'functions that are gone or take other arguments:\n'; printf '  %s\n' "${called[@]}"; status=1; }

abidiff --non-reachable-types --no-added-syms "$folder/old.abi" "$folder/new.abi" >"$folder/layouts" || true
if grep -qE 'types summary:.* [1-9][0-9]* (removed|changed)' "$folder/layouts"; then
  cat "$folder/layouts"
  status=1
elif ! grep -q 'changes summary' "$folder/layouts" && [ -s "$folder/layouts" ]; then
  fail "abidiff can't compare: $(head -n 3 "$folder/layouts")"
fi
[ $status != 0 ] || echo "programs built with $1 run with $2 ($own functions of the library's own have changed)"
exit $status
