# Installation. Each package is a component: `cmake --install build --component core`. A package that was not built is left out. The modules of the
# engine mpi are a component, too.
include(CMakePackageConfigHelpers)
set(_to_cmake ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
set(_to_pkgconfig ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH _from_pkgconfig "/prefix/${_to_pkgconfig}" "/prefix")

# tessera_install_package(PACKAGE TARGET HEADERS...): with a file for pkg-config of these variables
function(tessera_install_package package target)
  set(_may_be_missing OPTIONAL)
  if(package STREQUAL "core")
    set(_may_be_missing "")
  endif()
  install(TARGETS ${target} EXPORT Tessera_${package} COMPONENT ${package} ${_may_be_missing})
  install(EXPORT Tessera_${package} NAMESPACE tessera:: DESTINATION ${_to_cmake} COMPONENT ${package})
  string(REPLACE _ - _pc ${target}.pc)
  configure_file(cmake/tessera.pc.in ${_pc} @ONLY)
  list(JOIN ARGN " " _umbrellas)
  install(CODE "set(_package ${package})\nset(_library \"$<TARGET_LINKER_FILE:${target}>\")\nset(_root \"${PROJECT_SOURCE_DIR}\")
    set(_include \"${CMAKE_INSTALL_INCLUDEDIR}\")\nset(_umbrellas ${_umbrellas})
    set(_pc \"${PROJECT_BINARY_DIR}/${_pc}\")\nset(_to_pc \"${_to_pkgconfig}\")" COMPONENT ${package})
  install(SCRIPT cmake/install_headers.cmake COMPONENT ${package})
endfunction()

get_target_property(_definitions Libtorch::Libtorch INTERFACE_COMPILE_DEFINITIONS)
list(TRANSFORM _definitions PREPEND -D)
list(JOIN _definitions " " _definitions)
set(_requires "")
set(_libs "-L\${libdir} -ltessera -Wl,-rpath,\${libdir} -L\${torch}/lib -ltorch_cpu -lc10 -Wl,-rpath,\${torch}/lib -Wl,-rpath-link,\${torch}/lib")
set(_cflags "-std=c++20 -I\${includedir} -isystem \${torch}/include -isystem \${torch}/include/torch/csrc/api/include ${_definitions}")
tessera_install_package(core tessera tessera/tessera.h tessera/extending.h tessera/mpi.h)
set(_installed tessera)
set(_requires "tessera = ${PROJECT_VERSION}")
foreach(_umbrella IN ITEMS models.h vision.h xla/init.h)
  string(REGEX MATCH "^[a-z]+" _package ${_umbrella})
  if(TARGET tessera_${_package})
    string(TOUPPER "-DTESSERA_HAS_${_package}=1" _cflags)
    set(_libs "-L\${libdir} -Wl,--no-as-needed -ltessera_${_package}")  # what it registers is there though a program may call nothing of it
    tessera_install_package(${_package} tessera_${_package} tessera/${_umbrella})
    list(APPEND _installed tessera_${_package})
  endif()
endforeach()
if(TARGET tessera_cli)
  set(_programs tessera_cli)
  foreach(_module IN ITEMS tessera_cli_models tessera_cli_xla)
    if(TARGET ${_module})
      list(APPEND _programs ${_module})
    endif()
  endforeach()
  list(APPEND _installed ${_programs})
  install(TARGETS ${_programs} COMPONENT cli OPTIONAL LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  # The program itself writes what explains it, which it can do only where it runs.
  if(NOT CMAKE_CROSSCOMPILING)
    install(CODE "set(_program \"$<TARGET_FILE:tessera_cli>\")\nset(_share \"${CMAKE_INSTALL_DATAROOTDIR}\")\nset(_man \"${CMAKE_INSTALL_MANDIR}\")" COMPONENT cli)
    install(SCRIPT cmake/install_manual.cmake COMPONENT cli)
  endif()
endif()

# Libraries find each other, and libtorch: that of this build, or else a folder `torch` beside the installed folder or in /opt.
set(TESSERA_OWN_RUNPATH "$ORIGIN:$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
file(RELATIVE_PATH _out "/prefix/${CMAKE_INSTALL_LIBDIR}" "/")
set(TESSERA_MOVABLE_RUNPATH "$ORIGIN/${_out}torch/lib" "$ORIGIN/../../torch/lib" /opt/torch/lib)
list(REMOVE_DUPLICATES TESSERA_MOVABLE_RUNPATH)
list(JOIN TESSERA_MOVABLE_RUNPATH : TESSERA_MOVABLE_RUNPATH)
set_target_properties(${_installed} PROPERTIES INSTALL_RPATH_USE_LINK_PATH OFF
  INSTALL_RPATH "${TESSERA_OWN_RUNPATH}:${Libtorch_ROOT}/lib:${TESSERA_MOVABLE_RUNPATH}")

configure_package_config_file(cmake/TesseraConfig.cmake.in TesseraConfig.cmake
  INSTALL_DESTINATION ${_to_cmake} PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/TesseraConfig.cmake" "${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake" cmake/FindLibtorch.cmake
  DESTINATION ${_to_cmake} COMPONENT core)

file(REAL_PATH "${PROJECT_SOURCE_DIR}" _clone)
cmake_path(IS_PREFIX _clone "${Libtorch_ROOT}" NORMALIZE _torch_in_clone)
if(_torch_in_clone)
  install(CODE "message(STATUS \"What was installed loads libtorch from ${Libtorch_ROOT}, so that folder must stay. \"
    \"Configured with -DTESSERA_TORCH=FOLDER, a libtorch elsewhere, it does without this clone.\")" COMPONENT core)
endif()

if(PROJECT_IS_TOP_LEVEL)
  include(cmake/pack.cmake)
endif()
