# Toolchain for aarch64 on another processor. scripts/aarch64.sh makes the folder TESSERA_AARCH64: sysroot/ is a Debian, torch/ a libtorch.
if(NOT TESSERA_AARCH64)
  set(TESSERA_AARCH64 "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64")
endif()
get_filename_component(TESSERA_AARCH64 "${TESSERA_AARCH64}" ABSOLUTE)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_AARCH64)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_SYSROOT "${TESSERA_AARCH64}/sysroot")
# A processor without SVE, whose instructions qemu emulates several times as slowly.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu neoverse-n1 -L "${CMAKE_SYSROOT}")

set(CMAKE_FIND_ROOT_PATH "${CMAKE_SYSROOT}" "${TESSERA_AARCH64}/torch")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
