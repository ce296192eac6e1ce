#include "tessera/shard/activation.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/activation/segment_forward.h"
#include "tessera/shard/paging/paging.h"

namespace tessera::activation {

KeepRule operators(std::vector<std::string> names) {
  std::set<std::string> known;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) known.insert(name.name);
  for (const auto& name : names) {
    if (known.contains(name)) continue;
    const auto nearest = nearest_name(name, {known.begin(), known.end()});
    throw UsageError("libtorch has no operator '{}'{}", name,
                     nearest.empty() ? "; names look like aten::mm" : fmt::format(" (did you mean '{}'?)", nearest));
  }
  return [names = std::set<std::string, std::less<>>(names.begin(), names.end())](std::string_view name) { return names.contains(name); };
}

bool is_recompute() {
  auto* const pass = SegmentPass::current();
  return pass != nullptr && pass->asked_is_recompute();
}

namespace detail {

at::Tensor placeholder() {
  static const auto empty = at::empty({0});
  return empty;
}

void refuse_inputs() {
  throw UsageError(
      "a checkpointed module was called with an input that can't be copied, so backward could not run the module again; pass a pointer to it");
}

RunningSegment::RunningSegment(const Options& options, Tensors inputs, Again again, const torch::nn::Module* module)
    : pass_([&]() -> std::unique_ptr<SegmentPass> {
        install_paging();
        if (options.offload == OffloadTo::Host && !inputs.empty() &&
            std::ranges::all_of(inputs, [](const at::Tensor& input) { return input.is_cpu(); })) {
          throw UsageError(
              "OffloadTo::Host moves activations from a device to the host, but all inputs of the checkpointed segment are on the host "
              "already; OffloadTo::Disk moves them to disk");
        }
        if (options.offload == OffloadTo::Disk) expect_sensible(options.disk);
        SegmentCall call{.options = options, .inputs = inputs, .again = std::move(again), .module = module};
        if (auto* const outer = SegmentPass::current()) return outer->inner(std::move(call));
        return std::make_unique<SegmentForward>(std::move(call), nullptr);
      }()) {}

RunningSegment::~RunningSegment() = default;

void RunningSegment::result(at::Tensor& tensor) const {
  pass_->result(tensor);
}

}  // namespace detail
}  // namespace tessera::activation
