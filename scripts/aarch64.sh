#!/usr/bin/env bash
# Builds the core and its tests for aarch64 on another processor, and runs the tests under qemu-user.
usage() {
  cat <<'TEXT'
scripts/aarch64.sh [--folder FOLDER] [FILTER]
  --folder FOLDER  where everything is made, 3 GB; build/aarch64 if none is given
  FILTER           a regular expression: only tests whose names match

Installs the cross-compiler, qemu-user and debootstrap where they are missing,
makes a Debian for aarch64 with the headers and libraries that the core needs,
and downloads libtorch's wheel for aarch64. Needs root for the Debian.
Tests that start other programs are left out, unless the kernel starts programs
for aarch64 (package binfmt-support), and those that watch this process's memory,
much of which is qemu's own.

Examples:
  scripts/aarch64.sh
  scripts/aarch64.sh '^(base|optim)/'
TEXT
}
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
folder=build/aarch64 filter=
while [ $# -gt 0 ]; do
  case $1 in
    --folder) [ $# -gt 1 ] || { echo "--folder needs a folder" >&2; exit 2; }; folder=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "aarch64.sh does not know $1" >&2; usage >&2; exit 2 ;;
    *) filter=$1 ;;
  esac
  shift
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

if ! { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static && command -v debootstrap && command -v unzip; } >/dev/null; then
  begin "installing the cross-compiler"
  { apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user-static debootstrap unzip; } \
    >"$folder/apt.log" 2>&1 || fail "$(tail -n 5 "$folder/apt.log")" "Please install g++-aarch64-linux-gnu, qemu-user-static, debootstrap and unzip."
  end "installed the cross-compiler"
fi

# Unpacked, not installed: nothing of it runs but the libraries. Headers that have no processor are the same in it.
if [ ! -e "$folder/sysroot/.whole" ]; then
  begin "making a Debian for aarch64"
  rm -rf --one-file-system "$folder/sysroot"
  packages=libc6-dev,zlib1g-dev,libyaml-cpp-dev,libdeflate-dev,libutf8proc-dev,libgtest-dev,libgmock-dev
  packages+=,libfmt-dev,libcli11-dev,nlohmann-json3-dev,libxxhash-dev
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1) || true
  debootstrap --foreign --arch=arm64 --variant=minbase --include="$packages" "$(. /etc/os-release && echo "$VERSION_CODENAME")" \
    "$folder/sysroot" ${mirror:+"$mirror"} >"$folder/debootstrap.log" 2>&1 ||
    fail "$(tail -n 5 "$folder/debootstrap.log")" "A Debian for aarch64 can't be made in $folder/sysroot; it takes root and a package mirror."
  for package in "$folder"/sysroot/var/cache/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$folder/sysroot" --exclude='./dev/*'
  done
  # Links to the root of that Debian, from here.
  find "$folder/sysroot/usr" -type l -lname '/*' -printf '%p\t%l\n' | while IFS=$'\t' read -r link target; do
    ln -sfrn "$folder/sysroot$target" "$link"
  done
  # qemu takes the files of that Debian before those of this machine, whose devices and temporary files are meant, but not its processor.
  rm -rf --one-file-system "$folder/sysroot/dev" "$folder/sysroot/tmp"
  [ ! -L "$folder/sysroot/proc" ] || rm "$folder/sysroot/proc"  # debootstrap may have linked it to this machine's
  mkdir -p "$folder/sysroot/proc" "$folder/sysroot/sys/devices/system/cpu/cpu0/regs/identification"
  echo 0x00000000413fd0c1 >"$folder/sysroot/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
  for ((i = 0; i < $(nproc); i++)); do
    printf '%s\t: %s\n' processor "$i" Features 'fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp' \
      'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1
    echo
  done >"$folder/sysroot/proc/cpuinfo"
  touch "$folder/sysroot/.whole"
  end "made a Debian for aarch64"
fi

# Of a wheel with CUDA, its part for GPUs stays away; two small libraries of CUDA are loaded by the other part.
if [ "$(cat "$folder/torch/.version" 2>/dev/null)" != "$torch_version" ]; then
  begin "downloading torch $torch_version for aarch64"
  make_python
  rm -rf "$folder/torch" "$folder/wheels"
  download() {
    build/python/bin/python -m pip --quiet --disable-pip-version-check download --no-deps --only-binary=:all: \
      --platform manylinux2014_aarch64 $(printf -- '--platform manylinux_2_%s_aarch64 ' {17..28}) --dest "$folder/wheels" "$@"
  }
  with_torch "$torch_version" download || fail "pip finds no torch $torch_version for aarch64."
  mapfile -t cuda < <(unzip -p "$folder"/wheels/torch-*.whl '*/METADATA' | cuda_of_torch)
  unzip -q "$folder"/wheels/torch-*.whl 'torch/lib/*' 'torch/include/*' -x 'torch/lib/*cuda*' -d "$folder/torch"
  [ ${#cuda[@]} = 0 ] || download "${cuda[@]}" ||
    fail "The CUDA run-time libraries that this torch loads can't be downloaded by pip."
  for package in "$folder"/wheels/nvidia*.whl; do
    [ ! -e "$package" ] || unzip -q "$package" 'nvidia/*/lib/*' -d "$folder/torch"
  done
  rm -rf "$folder/wheels"
  echo "$torch_version" >"$folder/torch/.version"
  end "downloaded torch $torch_version for aarch64"
fi

begin "configuring"
cmake -S . -B "$folder/build" -G Ninja --toolchain cmake/aarch64.cmake "-DTESSERA_AARCH64=$folder" "-DTESSERA_TORCH=$folder/torch/torch" \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON -DTESSERA_TESTS=ON -DTESSERA_WARNINGS_AS_ERRORS=ON >"$folder/configure.log" 2>&1 ||
  fail "$(cat "$folder/configure.log")"
end "configured"
build "$folder/build" --target tests_of_core

without='^(train/memory|shard/schedule/memory(_gathered)?|simulate/dry_run)$'
if ! grep -qs enabled /proc/sys/fs/binfmt_misc/qemu-aarch64; then
  without+='|'$(grep -rlE 'testing/(launched|run_program|child_task)\.h' tessera --include='*_test.cpp' | sed -E 's,^tessera/(.*)_test\.cpp$,^\1$,' | paste -sd'|')
fi
ctest --test-dir "$folder/build" --parallel "$(nproc)" --output-on-failure --no-tests=error -L '^core$' -E "$without" ${filter:+-R "$filter"}
