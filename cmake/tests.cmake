# One test program for each *_test.cpp, known to ctest by its path: "comm/mesh". Every test ends within 20 s on two idle
# cores, or belongs under --long.
find_package(GTest REQUIRED)
set(CMAKE_UNITY_BUILD OFF)  # tests use the same names for their helpers

option(TESSERA_LONG_TESTS "Also run the tests that are too slow for every run" OFF)
set(_environment OMP_NUM_THREADS=1 TESSERA_POISON=1)
if(TESSERA_SANITIZE STREQUAL "thread")
  # libtorch and gloo lock with code that the sanitizer can't see and unlock with inlined code that it sees, which looks like misuse of a mutex.
  list(APPEND _environment "TSAN_OPTIONS=suppressions='${PROJECT_SOURCE_DIR}/cmake/tsan.supp' halt_on_error=1 report_mutex_bugs=0")
elseif(TESSERA_SANITIZE STREQUAL "address")
  list(APPEND _environment "ASAN_OPTIONS=detect_stack_use_after_return=1"
    "LSAN_OPTIONS=suppressions='${PROJECT_SOURCE_DIR}/cmake/lsan.supp' print_suppressions=0")
endif()
set(_limit 60)  # three times what a test may take on an idle machine
if(TESSERA_SANITIZE)
  set(_limit 200)
endif()

file(GLOB_RECURSE _testing CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tessera/testing/*.cpp")
add_library(tessera_testing STATIC ${_testing})
target_link_libraries(tessera_testing PUBLIC tessera GTest::gtest GTest::gmock)
target_precompile_headers(tessera_testing PUBLIC <torch/torch.h> <gmock/gmock.h> <gtest/gtest.h>)
# Only the comparison with c10d's own groups includes these beside the library itself.
set_source_files_properties(tessera/comm/join_test.cpp PROPERTIES
  INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/tessera/comm/gloo/opaque")

if(NOT TESSERA_LONG_TESTS)
  list(FILTER _tests EXCLUDE REGEX "_long_test\\.cpp$")
endif()
# It watches `new` in a way that is a sanitizer's own.
if(TESSERA_SANITIZE)
  list(FILTER _tests EXCLUDE REGEX "/allocation_test\\.cpp$")
endif()
# The autograd engine hands backward passes for other devices to threads of its own, under locks that the thread sanitizer does not see:
# whatever such a thread reads would be a report.
if(TESSERA_SANITIZE STREQUAL "thread")
  list(FILTER _tests EXCLUDE REGEX "/(shard/device|checkpoint/local_ranks)_test\\.cpp$")
endif()
if(NOT Libtorch_PYTHON)
  list(FILTER _tests EXCLUDE REGEX "/pytorch_test\\.cpp$")
endif()
# The format of other people's files is tested with their own reader.
if(NOT DEFINED TESSERA_SAFETENSORS_PYTHON)
  foreach(_python IN ITEMS "${TESSERA_PYTHON}" "${PROJECT_SOURCE_DIR}/build/python/bin/python" python3)
    execute_process(COMMAND "${_python}" -c "import safetensors, numpy, xxhash" OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE _failed)
    if(_python AND _failed EQUAL 0)
      set(TESSERA_SAFETENSORS_PYTHON "${_python}" CACHE INTERNAL "An interpreter that imports safetensors")
      break()
    endif()
  endforeach()
endif()
if(NOT TESSERA_SAFETENSORS_PYTHON)
  message(STATUS "No Python here imports safetensors, numpy and xxhash: the test that lets it read our files is left out")
  list(FILTER _tests EXCLUDE REGEX "/formats/python_test\\.cpp$")
endif()
foreach(_source IN LISTS _tests)
  file(RELATIVE_PATH _name "${PROJECT_SOURCE_DIR}/tessera" "${_source}")
  string(REGEX REPLACE "_test\\.cpp$" "" _name "${_name}")
  string(REPLACE "/" "_" _target "test_${_name}")
  add_executable(${_target} ${_source})
  set_target_properties(${_target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(${_target} PRIVATE tessera_testing GTest::gtest_main)
  target_precompile_headers(${_target} REUSE_FROM tessera_testing)
  add_test(NAME ${_name} COMMAND ${_target} --gtest_brief=1)
  set(_own_limit ${_limit})
  if(_name MATCHES "_long$")
    set(_own_limit 1800)
  endif()
  set_tests_properties(${_name} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_own_limit})
endforeach()

target_compile_definitions(test_base_env PRIVATE TESSERA_ENVIRONMENT_PAGE="${PROJECT_SOURCE_DIR}/docs/environment.md")
if(Libtorch_PYTHON)
  target_compile_definitions(test_shard_pytorch PRIVATE
    TESSERA_TEST_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_SCRIPT="${PROJECT_SOURCE_DIR}/tests/pytorch/fsdp2.py")
endif()
if(TESSERA_SAFETENSORS_PYTHON)
  target_compile_definitions(test_checkpoint_formats_python PRIVATE
    TESSERA_TEST_PYTHON="${TESSERA_SAFETENSORS_PYTHON}" TESSERA_TEST_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/safetensors_files.py")
endif()
target_link_libraries(test_data_idx PRIVATE ZLIB::ZLIB)  # to pack what is read

# Where both are possible, parameters lie in memory that ranks share; what can be seen of them must be the same where they are gathered.
foreach(_name IN ITEMS checkpointing engine full_params gradients memory nested_units parameter_uses parity passes precision prefetch property pytorch refusal report
  write)
  if(NOT TARGET test_shard_${_name})
    continue()
  endif()
  add_test(NAME shard/${_name}_gathered COMMAND test_shard_${_name} --gtest_brief=1)
  set_tests_properties(shard/${_name}_gathered PROPERTIES ENVIRONMENT "${_environment};TESSERA_RESIDENCE=gathered" TIMEOUT ${_limit})
endforeach()

# As many drawn models as fit into a minute, in four tests; ten minutes of others where there is time.
set_property(TEST shard/property shard/property_gathered APPEND PROPERTY ENVIRONMENT TESSERA_PROPERTY_SECONDS=15)
function(more_models name first seconds)
  add_test(NAME shard/property_${name} COMMAND test_shard_property --gtest_brief=1)
  set_tests_properties(shard/property_${name} PROPERTIES TIMEOUT 1800
    ENVIRONMENT "${_environment};TESSERA_PROPERTY_FIRST=${first};TESSERA_PROPERTY_SECONDS=${seconds}")
endfunction()
more_models(second 1000000 15)
more_models(third 2000000 15)
more_models(fourth 3000000 15)
if(TESSERA_LONG_TESTS)
  more_models(long 4000000 600)
endif()

# other_test(NAME [STATUS s] [SAYS regular expression] [ENVIRONMENT name=value...] COMMAND ...): anything that is no gtest. The command must
# end with the status (0 unless given) and its output must match.
function(other_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "STATUS;SAYS" "ENVIRONMENT;COMMAND")
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} "-DSTATUS=${arg_STATUS}" "-DSAYS=${arg_SAYS}" -P "${PROJECT_SOURCE_DIR}/tests/expect.cmake"
    -- ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${_environment};${arg_ENVIRONMENT}" TIMEOUT ${_limit})
endfunction()

# The corpus of idioms, a chapter a test, and the page that is made of it.
file(GLOB _idioms CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/idioms/*.cpp")
add_executable(test_idioms ${_idioms})
set_target_properties(test_idioms PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
target_compile_definitions(test_idioms PRIVATE TESSERA_IDIOMS_PAGE="${PROJECT_SOURCE_DIR}/docs/idioms.md")
target_link_libraries(test_idioms PRIVATE tessera_testing)
target_precompile_headers(test_idioms REUSE_FROM tessera_testing)
foreach(_chapter IN ITEMS Construction Ties Writing Freezing Hooks Gradients Autograd Passes Precision Optimizers Values States Ranks Places Page)
  add_test(NAME idioms/${_chapter} COMMAND test_idioms --gtest_brief=1 "--gtest_filter=*/${_chapter}*:${_chapter}.*")
  set_tests_properties(idioms/${_chapter} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_limit})
endforeach()

# The readers of what others hand to us, fed with nonsense: by libFuzzer with clang and the address sanitizer, by a mutator of our own
# otherwise. A target for each file but the two that all share.
set(_fuzz_seconds 3)
if(TESSERA_LONG_TESTS)
  set(_fuzz_seconds 600)
endif()
file(GLOB _fuzz CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/fuzz/*.cpp")
list(FILTER _fuzz EXCLUDE REGEX "/(driver|support)\\.cpp$")
foreach(_source IN LISTS _fuzz)
  get_filename_component(_name "${_source}" NAME_WE)
  add_executable(fuzz_${_name} ${_source} "${PROJECT_SOURCE_DIR}/tests/fuzz/support.cpp")
  set_target_properties(fuzz_${_name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(fuzz_${_name} PRIVATE tessera fmt::fmt-header-only nlohmann_json::nlohmann_json)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND TESSERA_SANITIZE STREQUAL "address")
    target_link_options(fuzz_${_name} PRIVATE -fsanitize=fuzzer)
    set(_arguments "-max_total_time=${_fuzz_seconds}")
  else()
    target_sources(fuzz_${_name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/fuzz/driver.cpp")
    set(_arguments ${_fuzz_seconds})
  endif()
  add_test(NAME fuzz/${_name} COMMAND fuzz_${_name} ${_arguments})
  set_tests_properties(fuzz/${_name} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT 900)
endforeach()

find_package(Python3 REQUIRED COMPONENTS Interpreter)
other_test(house/rooms COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/check_rooms.py" "${PROJECT_SOURCE_DIR}")

set(_sanitizer_flag "")
if(TESSERA_SANITIZE)
  set(_sanitizer_flag "-fsanitize=${TESSERA_SANITIZE}")
endif()
other_test(install/consumer SAYS "sum over 3 ranks: 6.*step 99 loss.*step 99 loss.*peak of unsharded units.*${PROJECT_VERSION}" COMMAND ${CMAKE_COMMAND}
  "-DBUILD=${PROJECT_BINARY_DIR}" "-DSOURCE=${PROJECT_SOURCE_DIR}/tests/consumer" "-DFOLDER=${PROJECT_BINARY_DIR}/consumer"
  "-DFLAGS=${_sanitizer_flag}" -P "${PROJECT_SOURCE_DIR}/tests/consumer/run.cmake")

set_tests_properties(install/consumer PROPERTIES TIMEOUT 240)  # it compiles with torch's headers

add_dependencies(test_cli_launch tessera_cli)
add_dependencies(test_cli_readers tessera_cli)
add_dependencies(test_cli_failed_rank tessera_cli)
if(TESSERA_LONG_TESTS)
  add_dependencies(test_cli_kills_long tessera_cli)
endif()
add_dependencies(test_cli_ckpt tessera_cli)
other_test(cli/launch_test SAYS "launch: 3 ranks.*.rank 0. shm: 3 ranks.*.rank 0.   errors +ok"
  COMMAND $<TARGET_FILE:tessera_cli> launch --nproc-per-node 3 $<TARGET_FILE:tessera_cli> test)
other_test(cli/test SAYS "all transports keep their promises" COMMAND $<TARGET_FILE:tessera_cli> test)
other_test(cli/test_on_a_full_disk STATUS 1 SAYS "standard output can't be written: No space left on device"
  COMMAND sh -c "'$<TARGET_FILE:tessera_cli>' test --transport self >/dev/full")
other_test(cli/nine_ranks SAYS "threads: 9 ranks.*all transports keep" COMMAND $<TARGET_FILE:tessera_cli> test --transport threads --ranks 9)
other_test(cli/help SAYS "--transport.*all unless given.*--ranks.*Exit status" COMMAND $<TARGET_FILE:tessera_cli> test --help)
other_test(cli/unknown_transport STATUS 2 SAYS "pigeon" COMMAND $<TARGET_FILE:tessera_cli> test --transport pigeon)
other_test(cli/unknown_command STATUS 2 SAYS "no command 'lunch' .did you mean launch.*; choose one of launch, ckpt, test" COMMAND $<TARGET_FILE:tessera_cli> lunch)
other_test(cli/no_command STATUS 2 SAYS "a command is missing; choose one of launch, ckpt, test" COMMAND $<TARGET_FILE:tessera_cli>)
set(_store "TESSERA_STORE=file:${PROJECT_BINARY_DIR}/tests")
other_test(cli/missing_ranks STATUS 1 SAYS "ranks 1 and 2 of 3 still missing" ENVIRONMENT RANK=0 WORLD_SIZE=3 ${_store}/missing_ranks
  COMMAND $<TARGET_FILE:tessera_cli> test --limit 0.5)
other_test(cli/two_masters STATUS 2 SAYS "leave --ranks" ENVIRONMENT RANK=0 WORLD_SIZE=1 COMMAND $<TARGET_FILE:tessera_cli> test --ranks 3)

# The recipe as a person runs it.
foreach(_part IN ITEMS Training Trouble)
  other_test(recipes/mnist_${_part} COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/recipes/mnist.py"
    $<TARGET_FILE:tessera_cli> $<TARGET_FILE:mnist> ${_part})
endforeach()

# Launchers that others wrote.
find_program(MPIRUN mpirun)
if(MPIRUN)
  other_test(launchers/mpirun SAYS "shm: 3 ranks.*errors +ok"
    ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ${_store}/mpirun
    COMMAND ${MPIRUN} --oversubscribe -n 3 $<TARGET_FILE:tessera_cli> test)
endif()
if(Libtorch_PYTHON)
  other_test(launchers/torchrun SAYS "shm: 3 ranks.*errors +ok"
    COMMAND ${Libtorch_PYTHON} -m torch.distributed.run --standalone --no-python --nproc-per-node 3 $<TARGET_FILE:tessera_cli> test)
endif()
