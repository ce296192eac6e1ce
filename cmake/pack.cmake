# `cpack` in the build folder: tessera-VERSION-Linux.tar.gz, and for Debian tessera_VERSION.deb with tessera-mpi_VERSION.deb. Libtorch is in none of them.
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/tessera RENAME copyright COMPONENT core)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_GENERATOR TGZ)
find_program(DPKG_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(DPKG_SHLIBDEPS)
if(DPKG_SHLIBDEPS)
  list(APPEND CPACK_GENERATOR DEB)
endif()
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR "Tessera")
set(CPACK_PACKAGE_CONTACT "The Tessera authors <tessera@localhost>")
set(CPACK_PACKAGE_FILE_NAME "tessera-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_STRIP_FILES ON)
# The packages find libtorch where their users have it, and do not name the folder of this build.
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/pack_movable.cmake")
set(CPACK_TESSERA_TORCH "${Libtorch_ROOT}")
set(CPACK_TESSERA_RUNPATH "${TESSERA_OWN_RUNPATH}:${TESSERA_MOVABLE_RUNPATH}")

# Programs that do without MPI need not install two of them.
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${Libtorch_ROOT}/lib" "${PROJECT_BINARY_DIR}/lib")
set(CPACK_DEBIAN_TESSERA_PACKAGE_NAME tessera)
set(CPACK_DEBIAN_TESSERA_DESCRIPTION "${PROJECT_DESCRIPTION}
Library, headers and the command tessera.
It loads libtorch ${Libtorch_VERSION}, which is in no package of Debian: install the wheel
torch==${Libtorch_VERSION} or the archive of pytorch.org, and link its folder, which has
include/ and lib/, to /opt/torch. CMake takes another folder by TESSERA_TORCH.")
set(CPACK_DEBIAN_MPI_PACKAGE_NAME tessera-mpi)
set(CPACK_DEBIAN_MPI_PACKAGE_DEPENDS "tessera (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_MPI_DESCRIPTION "Tessera over MPI
Modules by which Tessera's ranks talk over Open MPI and MPICH.")
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/deb/postinst" @ONLY CONTENT [[#!/bin/sh
set -e
if [ "$1" = configure ] && [ ! -e /opt/torch/lib/libtorch_cpu.so ]; then
  echo "tessera needs libtorch @Libtorch_VERSION@, and /opt/torch/lib/libtorch_cpu.so is not there. With the wheel of torch==@Libtorch_VERSION@:"
  echo "  ln -s FOLDER/site-packages/torch /opt/torch"
fi
]])
file(CHMOD "${PROJECT_BINARY_DIR}/deb/postinst" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
file(WRITE "${PROJECT_BINARY_DIR}/deb/triggers" "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_TESSERA_PACKAGE_CONTROL_EXTRA "${PROJECT_BINARY_DIR}/deb/postinst" "${PROJECT_BINARY_DIR}/deb/triggers")

get_cmake_property(CPACK_COMPONENTS_ALL COMPONENTS)
include(CPack)
cpack_add_component_group(tessera)
foreach(_component IN LISTS CPACK_COMPONENTS_ALL)
  if(NOT _component STREQUAL "mpi")
    cpack_add_component(${_component} GROUP tessera)
  endif()
endforeach()
