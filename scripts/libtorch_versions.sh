#!/usr/bin/env bash
# Builds the core with each supported libtorch, and runs its tests.
usage() {
  cat <<'TEXT'
scripts/libtorch_versions.sh [VERSION...] [--syntax] [--folder FOLDER]
  VERSION          versions of torch, as pip names them; the newest of 2.11,
                   2.12, 2.13 and 2.14 if none is given
  --syntax         only check the syntax of what depends most on the version,
                   in a minute each, in place of a build of 15 minutes
  --folder FOLDER  where torch and the builds are kept, 5 GB each: build/torch
                   unless given. Files there are used again.

Examples:
  scripts/libtorch_versions.sh --syntax
  scripts/libtorch_versions.sh 2.14.1
TEXT
}
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
versions=() syntax= folder=$PWD/build/torch
while [ $# -gt 0 ]; do
  case $1 in
    2.*) versions+=("$1") ;;
    --syntax) syntax=yes ;;
    --folder) [ $# -gt 1 ] || { usage >&2; exit 2; }; folder=$(realpath -m "$2"); shift ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'libtorch_versions.sh does not know %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ ${#versions[@]} -gt 0 ] || versions=(2.11 2.12 2.13 2.14)

# Prints the folder of this torch, which it installs if it is not there.
torch_of() {
  local place=$folder/$1/python wanted=$1 pip cuda
  [[ $1 = *.*.* ]] || wanted=$1.*
  if [ ! -e "$place/.whole" ]; then
    rm -rf "$place"
    python3 -m venv "$place" >&2
    pip=("$place/bin/python" -m pip --quiet --disable-pip-version-check install)
    with_torch "$wanted" "${pip[@]}" >&2 || fail "torch $wanted can't be installed by pip."
    if ls "$place"/lib/python3*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1; then
      mapfile -t cuda < <(cat "$place"/lib/python3*/site-packages/torch-*.dist-info/METADATA | cuda_of_torch)
      "${pip[@]}" --no-deps "${cuda[@]}" >&2 || fail "The libraries of CUDA that torch $wanted loads can't be installed by pip."
    fi
    touch "$place/.whole"
  fi
  echo "$place"/lib/python3*/site-packages/torch
}

# The differences between versions are in compat.h, so these are its users, and who derives from libtorch's classes.
files_to_check() {
  { grep -rlE '#include "tessera/base/compat.h"|override \{|c10d::(Backend|ProcessGroup)|autograd/(engine|function)' tessera/base tessera/comm tessera/shard \
    --include='*.cpp' | xargs grep -lE 'torch/csrc|ATen/core/dispatch|compat.h|torch/library.h'; } | grep -vE '_test\.cpp$|/mpi/module/|/nccl\.cpp$' | sort
}

# check_syntax TORCH: as one unit, because libtorch's headers take longest
check_syntax() {
  files_to_check | sed 's/.*/#include "&"/' |
    "${CXX:-g++}" -std=c++20 -fsyntax-only -Wall -Wextra -Wno-unknown-pragmas -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DNDEBUG -DFMT_HEADER_ONLY=1 \
      -I. -Itessera/comm/gloo/opaque -isystem "$1/include" -isystem "$1/include/torch/csrc/api/include" -x c++ -
}

# build_and_test TORCH FOLDER
build_and_test() {
  TESSERA_TORCH=$1 cmake -S . -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON -DTESSERA_TORCH="$1" >"$2.log" &&
    cmake --build "$2" --target tests_of_core tessera_cli >>"$2.log" &&
    ctest --test-dir "$2" --parallel "$(nproc)" -L core --output-on-failure >>"$2.log"
}

report=() status=0
for version in "${versions[@]}"; do
  torch=$(torch_of "$version")
  begin=$SECONDS
  said="passed"
  if [ -n "$syntax" ]; then
    check_syntax "$torch" || { said=FAILED status=1; }
  else
    build_and_test "$torch" "$folder/$version/build" || { said="FAILED:"; status=1; tail -n 40 "$folder/$version/build.log" >&2; }
    said+=" ($(grep -E 'tests (passed|failed)' "$folder/$version/build.log" || echo "see $folder/$version/build.log"))"
  fi
  report+=("libtorch $version: $said in $((SECONDS - begin)) s")
done
printf '%s\n' "${report[@]}"
exit $status
