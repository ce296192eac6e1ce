#include "tests/testing/child_task.h"

#include <cstdio>
#include <exception>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera::testing {
namespace {

/// A static variable of a function, so that it exists when tasks of any file register before main().
std::map<std::string, ChildTask::Task>& tasks() {
  static std::map<std::string, ChildTask::Task> all;
  return all;
}

}  // namespace

ChildTask::ChildTask(const std::string& name, Task task) : name_(name) {
  if (!tasks().emplace(name, task).second) throw UsageError("two child tasks have the name '" + name + "'");
}

std::map<std::string, std::string> ChildTask::environment(const std::string& argument, std::map<std::string, std::string> more) const {
  more["TESSERA_TEST_CHILD"] = name_;
  more["TESSERA_TEST_ARGUMENT"] = argument;
  return more;
}

std::optional<int> run_child_task() {
  const auto name = env("TESSERA_TEST_CHILD");
  if (!name) return {};
  try {
    return tasks().at(*name)(env("TESSERA_TEST_ARGUMENT").value_or(""));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}

}  // namespace tessera::testing
