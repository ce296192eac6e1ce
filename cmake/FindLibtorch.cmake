# Finds libtorch without its own CMake package, which asks for a CUDA toolkit wherever torch was built with CUDA.
#
# Looks at TESSERA_TORCH (variable or environment: libtorch's folder, or the torch folder of a Python installation), then Torch_DIR,
# then an importable Python torch. Defines Libtorch::Libtorch, and
#   Libtorch_VERSION, Libtorch_ROOT, Libtorch_CUDA (ON if this torch can use GPUs), Libtorch_PYTHON (an interpreter that imports it)
include(FindPackageHandleStandardArgs)

set(Libtorch_OLDEST 2.11)
set(Libtorch_NEWEST 2.14)

# Not where a caller has set one already: old policies would replace its value.
if(NOT TESSERA_TORCH)
  set(TESSERA_TORCH "$ENV{TESSERA_TORCH}" CACHE PATH "Folder of libtorch, or the torch folder of a Python installation")
endif()
if(NOT TESSERA_PYTHON)
  set(TESSERA_PYTHON "" CACHE FILEPATH "Python interpreter to ask for torch")
endif()

set(_candidate "${TESSERA_TORCH}")
if(NOT _candidate)
  set(_torch_dir "${Torch_DIR}")
  if(NOT _torch_dir)
    set(_torch_dir "$ENV{Torch_DIR}")
  endif()
  if(_torch_dir)
    get_filename_component(_candidate "${_torch_dir}/../../.." ABSOLUTE)
  endif()
endif()
if(NOT TESSERA_PYTHON)
  find_program(Libtorch_ANY_PYTHON NAMES python3 python)
  mark_as_advanced(Libtorch_ANY_PYTHON)
  set(_python "${Libtorch_ANY_PYTHON}")
else()
  set(_python "${TESSERA_PYTHON}")
endif()
if(NOT _candidate AND _python)
  # find_spec does not import torch, so this is quick and works where only the C++ libraries do.
  execute_process(
    COMMAND "${_python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _candidate OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(Libtorch_VERSION "")
if(_candidate)
  foreach(_header headeronly/version.h csrc/api/include/torch/version.h)
    if(NOT Libtorch_VERSION AND EXISTS "${_candidate}/include/torch/${_header}")
      file(STRINGS "${_candidate}/include/torch/${_header}" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" Libtorch_VERSION "${_lines}")
    endif()
  endforeach()
  if(NOT Libtorch_VERSION)
    set(_named "TESSERA_TORCH=${TESSERA_TORCH}")
    if(NOT TESSERA_TORCH)
      set(_named "Torch_DIR=${_torch_dir} (which must end in share/cmake/Torch)")
    endif()
    message(FATAL_ERROR "${_named}: no libtorch in ${_candidate}, it has no include/torch/headeronly/version.h. "
                        "Set TESSERA_TORCH to the folder that holds include/ and lib/ of libtorch.")
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _minor "${Libtorch_VERSION}")
  if(_minor VERSION_LESS Libtorch_OLDEST OR _minor VERSION_GREATER Libtorch_NEWEST)
    message(FATAL_ERROR "libtorch ${Libtorch_VERSION} in ${_candidate} is not supported; Tessera needs ${Libtorch_OLDEST} to ${Libtorch_NEWEST}. "
                        "Set TESSERA_TORCH to another one.")
  endif()
endif()
set(Libtorch_ROOT "")
if(_candidate)
  file(REAL_PATH "${_candidate}" Libtorch_ROOT)
endif()

# Another torch than last time, or another build in the same folder: forget what was found in that one.
set(_identity "${Libtorch_ROOT}")
if(EXISTS "${Libtorch_ROOT}/lib/libtorch_cpu.so")
  file(SIZE "${Libtorch_ROOT}/lib/libtorch_cpu.so" _size)
  string(APPEND _identity " ${Libtorch_VERSION} ${_size}")
endif()
if(NOT "${_identity}" STREQUAL "${Libtorch_LAST}")
  foreach(_variable Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY Libtorch_CUDA_LIBRARY Libtorch_PYTHON TESSERA_LIBTORCH_WORKS)
    unset(${_variable} CACHE)
  endforeach()
  set(Libtorch_LAST "${_identity}" CACHE INTERNAL "")
endif()
find_library(Libtorch_CPU_LIBRARY torch_cpu PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
find_library(Libtorch_C10_LIBRARY c10 PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
find_library(Libtorch_CUDA_LIBRARY torch_cuda PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
mark_as_advanced(Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY Libtorch_CUDA_LIBRARY)
set(Libtorch_CUDA OFF)
if(Libtorch_CUDA_LIBRARY)
  set(Libtorch_CUDA ON)
endif()
if(TESSERA_LINK_CUDA AND Libtorch_ROOT AND NOT Libtorch_CUDA)
  message(FATAL_ERROR "TESSERA_LINK_CUDA is on, but libtorch ${Libtorch_VERSION} in ${Libtorch_ROOT} has no CUDA. "
                      "Set TESSERA_TORCH to one that was built with it.")
endif()

find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_ROOT Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "set TESSERA_TORCH to the folder of libtorch, or install torch for a python3 on the path")

# A wheel built with CUDA finds its run-time libraries in sibling folders; the linker has to be told.
function(tessera_libtorch_link_folders target root)
  file(GLOB _folders "${root}/../nvidia/*/lib")
  list(TRANSFORM _folders PREPEND "LINKER:-rpath-link,")
  target_link_options(${target} INTERFACE ${_folders})
endfunction()

if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
  add_library(Libtorch::Libtorch INTERFACE IMPORTED)
  target_include_directories(Libtorch::Libtorch SYSTEM INTERFACE
    "${Libtorch_ROOT}/include" "${Libtorch_ROOT}/include/torch/csrc/api/include")
  target_compile_features(Libtorch::Libtorch INTERFACE cxx_std_20)
  # What torch's own package would define. NDEBUG: some torch headers change their classes without it, and its libraries were built with it.
  target_compile_definitions(Libtorch::Libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO NDEBUG)
  target_link_libraries(Libtorch::Libtorch INTERFACE "${Libtorch_CPU_LIBRARY}" "${Libtorch_C10_LIBRARY}")
  tessera_libtorch_link_folders(Libtorch::Libtorch "${Libtorch_ROOT}")
endif()

# tessera_libtorch_cuda(TARGET ROOT): what the one source needs that is particular to CUDA, of the libtorch with CUDA in ROOT.
function(tessera_libtorch_cuda target root)
  file(GLOB _headers "${root}/../nvidia/*/include")  # of CUDA itself, in a wheel
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} SYSTEM INTERFACE "${root}/include" "${root}/include/torch/csrc/api/include" ${_headers})
  target_compile_definitions(${target} INTERFACE TESSERA_NCCL USE_C10D_NCCL)
  # Nothing else refers to torch_cuda by name: it registers its kernels when it is loaded.
  tessera_libtorch_link_folders(${target} "${root}")
  target_link_options(${target} INTERFACE "LINKER:--no-as-needed,${root}/lib/libtorch_cuda.so,--as-needed")
  target_link_libraries(${target} INTERFACE "${root}/lib/libc10_cuda.so")
endfunction()

# Tests compare with PyTorch itself, where it can be imported.
if(NOT DEFINED Libtorch_PYTHON AND _python)
  execute_process(COMMAND "${_python}" -c "import torch; print(torch.__file__)"
    OUTPUT_VARIABLE _file OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
  get_filename_component(_folder "${_file}" DIRECTORY)
  if(NOT _failed)
    file(REAL_PATH "${_folder}" _folder)
  endif()
  if(NOT _failed AND _folder STREQUAL Libtorch_ROOT)
    set(Libtorch_PYTHON "${_python}" CACHE INTERNAL "An interpreter that imports the torch that Tessera links")
  endif()
endif()
