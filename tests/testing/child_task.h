// ChildTask: a task that a test runs in a child process. The test starts its own program again, in which main() runs the task instead of
// the tests.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace tessera::testing {

/// const ChildTask hold("hold the lock", [](const std::string& prefix) { ...; return 0; });
/// Process owner({this_program()}, hold.environment(prefix));
class ChildTask {
 public:
  /// Returns the exit status of the process. An exception of the task is printed, and the status is 3.
  using Task = int (*)(const std::string& argument);

  ChildTask(const std::string& name, Task task);

  /// The variables that make the program run this task.
  std::map<std::string, std::string> environment(const std::string& argument = {}, std::map<std::string, std::string> more = {}) const;

 private:
  std::string name_;
};

/// Runs the task if this process was started as a child with a task, and returns the exit status.
std::optional<int> run_child_task();

}  // namespace tessera::testing
