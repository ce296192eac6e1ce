# Installs the headers that programs include, from below _root to _include: the two umbrella headers, models, layers, what language models need, that of
# XLA devices where the library has them (_of_xla), and what these include themselves. All others are for the library's own sources, and may need headers that a
# program has not.
cmake_policy(PUSH)
cmake_policy(VERSION 3.25)  # scripts begin with none
file(GLOB _waiting RELATIVE "${_root}" "${_root}/tessera/tessera.h" "${_root}/tessera/extending.h" "${_root}/tessera/models/*.h" "${_root}/tessera/nn/*.h"
  "${_root}/tessera/llm/*.h")
list(FILTER _waiting EXCLUDE REGEX "models/config_file\\.h$|nn/rows\\.h$|_kernels\\.h$")
list(APPEND _waiting ${_of_xla})
set(_public "")
while(_waiting)
  list(POP_FRONT _waiting _header)
  if(_header IN_LIST _public)
    continue()
  endif()
  list(APPEND _public "${_header}")
  file(STRINGS "${_root}/${_header}" _includes REGEX "^#include \"tessera/")
  list(TRANSFORM _includes REPLACE "^#include \"(.*)\".*$" "\\1")
  list(APPEND _waiting ${_includes})
endwhile()
cmake_path(ABSOLUTE_PATH _include BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}")
foreach(_header IN LISTS _public)
  cmake_path(GET _header PARENT_PATH _folder)
  file(INSTALL "${_root}/${_header}" DESTINATION "${_include}/${_folder}")
endforeach()
cmake_policy(POP)
