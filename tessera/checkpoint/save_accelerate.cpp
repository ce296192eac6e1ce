#include "tessera/checkpoint/save_accelerate.h"

#include <fmt/format.h>

#include <exception>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

fs::path with_suffix(fs::path folder, const char* suffix) {
  if (!folder.has_filename()) folder = folder.parent_path();
  return folder += suffix;
}

void move_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) throw IoError(fmt::format("can't rename {} to {}: {}", from.string(), to.string(), error.message()));
}

void expect_replaceable(const fs::path& folder) {
  if (!is_there(folder) || is_accelerate_folder(folder)) return;
  if (const auto names = names_in(folder); names && names->empty()) return;
  throw UsageError(fmt::format("{} is there already, and no folder of Accelerate's; save under another name", folder.string()));
}

/// The old folder stays until the new one has its name.
void replace_folder(const fs::path& folder, const fs::path& made) {
  if (!is_there(folder)) return move_folder(made, folder);
  const auto old = with_suffix(folder, ".old");
  std::error_code unknown;
  fs::remove_all(old, unknown);
  move_folder(folder, old);
  move_folder(made, folder);
  fs::remove_all(old, unknown);
}

}  // namespace

void save_accelerate(const fs::path& folder, const Contents& contents, const Communicator& world, const SaveAccelerateOptions& options) {
  const auto native = with_suffix(folder, ".native"), made = with_suffix(folder, ".new");
  const auto on_first = [&](c10::function_ref<void()> act) {
    all_or_none(world, {.unit = "checkpoint"}, fmt::format("could not save {}; what was there is unchanged", folder.string()), [&] {
      if (world.is_first()) act();
    });
  };
  on_first([&] {
    expect_replaceable(folder);
    fs::remove_all(native);  // of a program that was killed
    fs::remove_all(made);
  });
  save(native, contents, world);
  std::exception_ptr failure;
  try {
    on_first([&] {
      convert(native, made,
              {.to = Format::Accelerate,
               .world = world.size(),
               .full_state_dict = options.full_state_dict,
               .settings = options.settings,
               .notes_of_first_rank = true});
      replace_folder(folder, made);
    });
  } catch (...) {
    failure = std::current_exception();
  }
  std::error_code unknown;
  if (world.is_first()) fs::remove_all(native, unknown);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera::checkpoint
