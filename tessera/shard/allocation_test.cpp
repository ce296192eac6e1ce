// In the steady state Tessera allocates no memory in a training step, because it reuses the memory of the step before. The test counts all
// calls of `new` in the process; a call counts as Tessera's if its nearest caller outside of the C++ library and fmt is Tessera's. It also
// counts the allocations of tensor memory: a sharded step must make no more of them than the same step of an unsharded model.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unwind.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <map>
#include <new>

#include "tessera/optim/adam.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/blocks.h"
#include "tests/testing/net.h"

namespace {

std::atomic<bool> watched = false;
thread_local bool looking = false;

bool is_of(const char* text, std::string_view what) {
  return text != nullptr && std::string_view(text).find(what) != std::string_view::npos;
}

/// Called for each stack frame, from the innermost outwards; the first two frames are this hook's.
_Unwind_Reason_Code look_at(_Unwind_Context* context, void* result) {
  auto* const address = reinterpret_cast<void*>(_Unwind_GetIP(context) - 1);
  Dl_info info = {};
  if (dladdr(address, &info) == 0) return _URC_END_OF_STACK;
  const bool of_hook = is_of(info.dli_fname, "test_shard_allocation");
  const bool of_library = is_of(info.dli_fname, "libstdc++") ||
                          (info.dli_sname != nullptr &&
                           (std::string_view(info.dli_sname).starts_with("_ZNSt") || std::string_view(info.dli_sname).starts_with("_ZSt") ||
                            std::string_view(info.dli_sname).starts_with("_ZN3fmt")));
  if (of_hook || of_library) return _URC_NO_REASON;
  if (is_of(info.dli_fname, "libtessera")) *static_cast<void**>(result) = address;
  return _URC_END_OF_STACK;
}

std::atomic<size_t> count = 0;
std::array<std::atomic<void*>, 4096> sites = {};

void* take(size_t bytes, size_t alignment) {
  if (watched && !looking) {
    looking = true;
    void* site = nullptr;
    _Unwind_Backtrace(&look_at, &site);
    if (site != nullptr) sites[count++ % sites.size()] = site;
    looking = false;
  }
  void* const memory = alignment == 0 ? std::malloc(bytes) : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// After inlining, the compiler warns that memory is allocated in one way and freed in another.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t bytes) {
  return take(bytes, 0);
}
void* operator new[](size_t bytes) {
  return take(bytes, 0);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return take(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace tessera::testing {
namespace {

/// Where in our code memory was taken, and how often.
std::string places() {
  std::map<std::string, size_t> found;
  for (size_t i = 0; i < std::min<size_t>(count, sites.size()); i++) {
    Dl_info info = {};
    dladdr(sites[i], &info);
    const auto offset = static_cast<char*>(sites[i].load()) - static_cast<char*>(info.dli_fbase);
    found["libtessera.so+" + std::to_string(offset) + " " + (info.dli_sname == nullptr ? "" : info.dli_sname)]++;
  }
  std::string result;
  for (const auto& [place, times] : found) result += std::to_string(times) + " x " + place + "\n";
  return result;
}

/// libtorch's allocator, with its calls counted.
struct CountedMemory final : c10::Allocator {
  c10::Allocator* const next = c10::GetAllocator(c10::kCPU);
  std::atomic<size_t> calls = 0;

  CountedMemory() { c10::SetAllocator(c10::kCPU, this, /*priority=*/255); }
  c10::DataPtr allocate(size_t bytes) override {
    calls += watched ? 1 : 0;
    return next->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return next->raw_deleter(); }
  void copy_data(void* target, const void* source, size_t bytes) const override { next->copy_data(target, source, bytes); }
};

/// Replaces libtorch's allocator for the rest of the process.
CountedMemory& tensor_memory() {
  static auto* const counted = new CountedMemory;
  return *counted;
}

constexpr size_t kRanks = 2, kUnits = 6, kWarm = 6, kCounted = 2;

/// Takes the steps of a rank, of which the last ones are counted. All ranks meet in `together` before and after these.
void train(Blocks& model, optim::Optimizer& optimizer, int rank, double max_norm, const std::function<void(bool on)>& together) {
  const auto x = numbers({6, 8}, 1 + rank);  // differs by rank, because Tessera watches for equal batches
  for (size_t step = 0; step < kWarm + kCounted; step++) {
    if (step == kWarm) together(true);
    model.forward(x).pow(2).mean().backward();
    if (max_norm > 0) optimizer.clip_grad_norm(max_norm);
    optimizer.step();
    optimizer.zero_grad();
  }
  together(false);
}

struct Case {
  std::string name;
  Residence residence;
  MixedPrecision precision = {};
  double max_norm = 0;
  size_t per_gather = 0, per_reduction = 0, per_norm = 0;  // allocations of the transport's queue for each operation
  friend std::ostream& operator<<(std::ostream& out, const Case& self) { return out << self.name; }
};

class Allocation : public ::testing::TestWithParam<Case> {};

TEST_P(Allocation, IsWhatLibtorchTakesOver) {
  const auto& param = GetParam();
  auto& memory = tensor_memory();
  std::barrier meeting(kRanks);
  std::atomic<size_t> handles = 0, gathers = 0, reductions = 0;
  with_ranks(kRanks, [&](const Communicator& world) {
    Blocks model(kUnits);
    const ShardOptions options{.mesh = world, .mixed_precision = param.precision, .residence = param.residence};
    for (const auto& block : model.block) fully_shard(block, options);
    fully_shard(model, options);
    optim::AdamW optimizer(parameters(model), {.lr = 1e-3});
    train(model, optimizer, world.rank(), param.max_norm, [&](bool on) {
      meeting.arrive_and_wait();
      if (on) {
        count = memory.calls = 0;
        reset_counters(model);
        meeting.arrive_and_wait();
      }
      watched = on;
      meeting.arrive_and_wait();
    });
    handles += parameters(model).size() * kCounted;
    for (const auto& unit : units(model)) {
      gathers += unit->counters().gathers;
      reductions += unit->counters().reductions;
    }
  });
  // The autograd engine takes over a handle for each gradient, a list of them from each unit, and callbacks for the end of a pass.
  const size_t passes = kRanks * kCounted, lists = passes * kUnits, ends = 2 * passes;
  EXPECT_EQ(count, handles + lists + ends + param.per_gather * gathers + param.per_reduction * reductions + param.per_norm * passes)
      << places();

  // If all gradients are in shared memory and nothing is cast, a step makes the same tensors as a step of the whole model.
  if (param.residence != Residence::NodeShared || param.precision.param_dtype || param.max_norm > 0) return;
  const size_t sharded = memory.calls;
  Blocks whole(kUnits);
  optim::AdamW optimizer(whole.parameters(), {.lr = 1e-3});
  train(whole, optimizer, 0, 0, [&](bool on) {
    if (on) memory.calls = 0;
    watched = on;
  });
  EXPECT_GT(sharded, 0U);
  EXPECT_LE(sharded, kRanks * memory.calls);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, Allocation,
    ::testing::Values(Case{.name = "NodeShared", .residence = Residence::NodeShared},
                      Case{.name = "NodeSharedBfloat16", .residence = Residence::NodeShared, .precision = {.param_dtype = at::kBFloat16}},
                      Case{.name = "NodeSharedClipped", .residence = Residence::NodeShared, .max_norm = 0.1, .per_norm = 2},
                      Case{.name = "Gathered", .residence = Residence::Gathered, .per_gather = 5, .per_reduction = 2}),
    ::testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::testing
