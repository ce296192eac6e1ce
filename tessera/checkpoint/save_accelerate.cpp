#include "tessera/checkpoint/save_accelerate.h"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void expect_no_tensors(const Contents& contents) {
  for (const auto* tensors : {&contents.tensors, &contents.tensors_by_rank}) {
    if (tensors->empty()) continue;
    throw UsageError(fmt::format("Accelerate's folders have no place for the tensor '{}' beside the model; save it with checkpoint::save",
                                 tensors->begin()->first));
  }
}

void expect_replaceable(const fs::path& folder) {
  if (!is_there(folder) || is_accelerate_folder(folder)) return;
  if (const auto names = names_in(folder); names && names->empty()) return;
  throw UsageError(fmt::format("{} is there already, and no folder of Accelerate's; save under another name", folder.string()));
}

}  // namespace

void save_accelerate(const fs::path& given, const Contents& contents, const Communicator& world, const SaveAccelerateOptions& options) {
  const auto folder = link_target(given);  // a link stays, and what it leads to is replaced
  const auto native = beside(folder, ".native"), made = beside(folder, ".new");
  // The others notice it if rank 0 ends meanwhile, so they may wait as long as it takes.
  const auto patient = world.with_limit(std::chrono::hours(24));
  all_or_none(patient, {.unit = "checkpoint"}, fmt::format("could not save {}; what was there is unchanged", folder.string()),
              [&] { expect_no_tensors(contents); });
  const auto on_first = [&](c10::function_ref<void()> act) {
    all_or_none(patient, {.unit = "checkpoint"}, fmt::format("could not save {}; what was there is unchanged", folder.string()), [&] {
      if (world.is_first()) act();
    });
  };
  on_first([&] {
    recover_folder(folder);
    if (!options.replaces_any) expect_replaceable(folder);
    fs::remove_all(native);  // of a program that was killed
    fs::remove_all(made);
  });
  auto with_settings = contents;
  if (contents.optimizer && contents.model != nullptr) with_settings.notes[kSettingsNote] = contents.optimizer.settings(*contents.model);
  save(native, with_settings, world);
  std::exception_ptr failure;
  try {
    on_first([&] {
      convert(native, made,
              {.to = Format::Accelerate,
               .world = world.size(),
               .full_state_dict = options.full_state_dict,
               .replicated = options.replicated,
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
