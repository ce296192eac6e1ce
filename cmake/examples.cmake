# Recipes, examples and benchmarks, and what they share with tests.

# Sets `result` to the programs of a folder. Those of these names are left out where the package xla or vision is not built.
function(tessera_programs result folder of_xla of_vision)
  file(GLOB _programs CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${folder}/*.cpp")
  if(NOT PJRT_INCLUDE_DIR)
    list(FILTER _programs EXCLUDE REGEX "/(${of_xla})\\.cpp$")
  endif()
  if(NOT TARGET tessera_vision)
    list(FILTER _programs EXCLUDE REGEX "/(${of_vision})\\.cpp$")
  endif()
  set(${result} ${_programs} PARENT_SCOPE)
endfunction()

# What programs and tests do often is in the library, which is optimised: the compiler would take longer over them than they run. With a sanitizer
# they run longer.
set(_of_programs "$<$<CONFIG:Release>:$<IF:$<BOOL:${TESSERA_SANITIZE}>,-O1,-O0>>")

# Of the recipes ./quickstart builds one alone, for which a precompiled header would take longer, and which needs of the models its own.
tessera_programs(_recipes recipes "" "imagenet")
foreach(_source IN LISTS _recipes)
  get_filename_component(_name "${_source}" NAME_WE)
  add_executable(${_name} ${_source})
  target_link_libraries(${_name} PRIVATE $<IF:$<STREQUAL:${_name},mnist>,tessera,tessera_all> fmt::fmt-header-only CLI11::CLI11)
  target_compile_options(${_name} PRIVATE ${_of_programs})
endforeach()
target_sources(mnist PRIVATE "${PROJECT_SOURCE_DIR}/tessera/models/mnist.cpp")
if(PJRT_INCLUDE_DIR)
  target_link_libraries(mnist PRIVATE tessera_xla)
endif()
add_dependencies(glue tessera_cli_models)
add_dependencies(llama tessera_cli_models)

# What programs and tests include takes the compiler longer than what they say themselves, so it is compiled once for all of them.
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/headers.cpp" CONTENT "")
add_library(tessera_headers OBJECT EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/headers.cpp")
target_link_libraries(tessera_headers PRIVATE tessera)
# Not out of a cache: a precompiled header knows its files by their times, and would not know files that were checked out again.
set_target_properties(tessera_headers PROPERTIES CXX_COMPILER_LAUNCHER "")
target_precompile_headers(tessera_headers PRIVATE <torch/torch.h> <tessera/tessera.h>)
target_compile_options(tessera_headers PRIVATE ${_of_programs})
if(TESSERA_TESTS)  # otherwise few recipes are built, and compiling them takes no longer than the header
  foreach(_name IN ITEMS glue llama imagenet)
    if(TARGET ${_name})
      target_precompile_headers(${_name} REUSE_FROM tessera_headers)
    endif()
  endforeach()
endif()

# Also gives a program these names, in the folder where it is: it does what the name says by which it is called.
function(tessera_also_called target)
  foreach(_name IN LISTS ARGN)
    add_custom_command(TARGET ${target} POST_BUILD VERBATIM
      COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE_NAME:${target}> $<TARGET_FILE_DIR:${target}>/${_name})
  endforeach()
endfunction()

# Examples: built on request (ninja examples) and with the tests, as one program, each in a namespace of its own; first.cpp becomes examples/first.
if(TESSERA_TESTS AND NOT TESSERA_SANITIZE)
  set(_with_tests "")
else()
  set(_with_tests EXCLUDE_FROM_ALL)
endif()
tessera_programs(_examples examples "xla[a-z_]*" "classify")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_examples})
list(FILTER _examples EXCLUDE REGEX "/mpi_program\\.cpp$")  # a program of its own, below
set(_includes "")
set(_texts "")
set(_table "")
set(_names "")
foreach(_source IN LISTS _examples)
  get_filename_component(_name "${_source}" NAME_WE)
  list(APPEND _names ${_name})
  file(READ "${_source}" _text)
  string(REGEX MATCHALL "#include <[^>]+>" _of_this "${_text}")
  list(APPEND _includes ${_of_this})
  set(_call "main_of(argc, argv)")
  if(_text MATCHES "int main\\(\\)")
    set(_call "main_of()")
  endif()
  # Only main itself may end without a return.
  string(REPLACE "\nint main(" "\nint main_of(" _text "${_text}")
  string(REGEX REPLACE "}\n$" "  return 0;\n}\n" _text "${_text}")
  string(APPEND _texts "namespace example_${_name} {\n#line 1 \"${_source}\"\n${_text}}\n")
  string(APPEND _table "  if (name == \"${_name}\") return example_${_name}::${_call};\n")
endforeach()
list(REMOVE_DUPLICATES _includes)
list(JOIN _includes "\n" _includes)
file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/examples.cpp" CONTENT
"${_includes}
${_texts}
#line 1 \"examples\"
int main(int argc, char** argv) {
  std::string name = argv[0];
  name.erase(0, name.rfind('/') + 1);
${_table}  std::fputs(\"call an example by its name, such as first\\n\", stderr);
  return 2;
}
")
add_executable(examples ${_with_tests} "${PROJECT_BINARY_DIR}/examples.cpp")
set_target_properties(examples PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples")
target_link_libraries(examples PRIVATE tessera_all)
target_compile_options(examples PRIVATE ${_of_programs})
target_precompile_headers(examples REUSE_FROM tessera_headers)
tessera_also_called(examples ${_names})
add_dependencies(examples tessera_cli tessera_cli_models)
if(PJRT_INCLUDE_DIR)
  add_dependencies(examples tessera_cli_xla)
endif()
foreach(_name IN LISTS _names)
  add_custom_target(${_name} DEPENDS examples)
endforeach()

if(TESSERA_MPIS)
  list(GET TESSERA_MPIS 0 _mpi)
  add_executable(mpi_program ${_with_tests} examples/mpi_program.cpp)
  set_target_properties(mpi_program PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples")
  target_link_libraries(mpi_program PRIVATE tessera mpi_${_mpi})
  target_compile_options(mpi_program PRIVATE ${_of_programs})
  target_precompile_headers(mpi_program REUSE_FROM tessera_headers)
endif()

# Benchmarks: built on request (ninja benchmarks) and with the long tests, so that they stay whole; train.cpp becomes bin/bench_train.
if(TESSERA_TESTS AND TESSERA_LONG_TESTS AND NOT TESSERA_SANITIZE)
  set(_with_long_tests ALL)
endif()
add_custom_target(benchmarks ${_with_long_tests})
tessera_programs(_benchmarks bench "xla_train|pod" "pictures")
foreach(_source IN LISTS _benchmarks)
  get_filename_component(_name "${_source}" NAME_WE)
  add_executable(bench_${_name} EXCLUDE_FROM_ALL ${_source})
  target_link_libraries(bench_${_name} PRIVATE tessera_all fmt::fmt-header-only CLI11::CLI11 nlohmann_json::nlohmann_json)
  add_dependencies(benchmarks bench_${_name})
endforeach()
if(TESSERA_TESTS)  # the test of docs/scaling.md runs it
  set_target_properties(bench_scaling_model PROPERTIES EXCLUDE_FROM_ALL OFF)
endif()
