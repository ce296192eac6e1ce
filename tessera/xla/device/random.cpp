#include "tessera/xla/device/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::fixed;

constexpr size_t kStateBytes = 16;

/// The state is two numbers for each replica, in a tensor on the device.
class XlaGenerator final : public c10::GeneratorImpl {
 public:
  XlaGenerator() : GeneratorImpl(c10::Device(kXla, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    state_ = at::Tensor();  // made when it is needed: libtorch seeds before the first tensor
  }
  void set_offset(uint64_t /*offset*/) override { throw UsageError("the generator of an XLA device has no offset: set its state"); }
  uint64_t get_offset() const override { throw UsageError("the generator of an XLA device has no offset: ask for its state"); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  /// Bytes on the CPU, as those of libtorch's own generators: the numbers of all replicas.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({static_cast<int64_t>(kStateBytes) * runner().replicas()}, at::kByte);
    auto* to = bytes.mutable_data_ptr<uint8_t>();
    for (const auto& numbers : replicas(const_cast<XlaGenerator&>(*this).state())) {
      std::memcpy(to, numbers.const_data_ptr(), kStateBytes);
      to += kStateBytes;
    }
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    const size_t expected = kStateBytes * static_cast<size_t>(runner().replicas());
    if (state.dtype() != caffe2::TypeMeta::Make<uint8_t>() || static_cast<size_t>(state.numel()) != expected || !state.is_cpu()) {
      throw UsageError(fmt::format("the state of an XLA device's generator with {} replicas is {} bytes on the CPU", runner().replicas(), expected));
    }
    std::vector<at::Tensor> all;
    for (int replica = 0; replica < runner().replicas(); replica++) {
      all.push_back(at::empty({2}, at::kUInt64));
      std::memcpy(all.back().mutable_data_ptr(), static_cast<const uint8_t*>(state.data()) + kStateBytes * static_cast<size_t>(replica), kStateBytes);
    }
    seed_ = all[0].const_data_ptr<uint64_t>()[0];
    state_ = from_replicas(all);
  }
  static c10::DeviceType device_type() { return kXla; }

  at::Tensor& state() {
    if (!state_.defined()) {
      std::vector<at::Tensor> all;
      for (uint64_t replica = 0; replica < static_cast<uint64_t>(runner().replicas()); replica++) {
        all.push_back(at::empty({2}, at::kUInt64));
        all.back().mutable_data_ptr<uint64_t>()[0] = seed_;
        all.back().mutable_data_ptr<uint64_t>()[1] = replica << 32;  // far from each other in one stream
      }
      state_ = from_replicas(all);
    }
    return state_;
  }

 private:
  XlaGenerator* clone_impl() const override {
    auto* const copy = new XlaGenerator;
    copy->seed_ = seed_;
    if (state_.defined()) copy->set_state(*get_state());
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  at::Tensor state_;
};

XlaGenerator& generator_of(const std::optional<at::Generator>& given) {
  const auto& generator = given && given->defined() ? *given : device_generator();
  if (generator.device().type() != kXla) {
    throw UsageError(fmt::format("an operator on xla got a generator of {}: make one for xla, or leave it out", generator.device().str()));
  }
  return *static_cast<XlaGenerator*>(generator.unsafeGetGeneratorImpl());
}

Value random_bits(const std::optional<at::Generator>& given, const Sizes& sizes) {
  auto& state = generator_of(given).state();
  const auto [next, bits] = hlo::random_bits(read(state), {at::kUInt32, sizes}, "PHILOX");
  write(state, next);
  return bits;
}

std::optional<at::Generator> generator_in(const Call& call, size_t i) {
  return i < call.arguments() && call.has(i) ? std::optional(call[i].toGenerator()) : std::nullopt;
}

/// In [0, 1), with the 24 bits that a float has.
Value uniform_numbers(const std::optional<at::Generator>& given, const Sizes& sizes) {
  const auto bits = random_bits(given, sizes);
  const auto high = hlo::binary("shift_right_logical", bits, hlo::broadcast(hlo::constant(int64_t{8}, at::kUInt32), sizes, {}));
  const auto numbers = hlo::convert(high, at::kFloat);
  return hlo::binary("multiply", numbers, hlo::broadcast(hlo::constant(0x1p-24, at::kFloat), sizes, {}));
}

void give_to_self(Call& call, const Value& numbers) { call.give(hlo::convert(numbers, call.tensor(0).scalar_type())); }

void uniform(Call& call) {
  const auto u = uniform_numbers(generator_in(call, 3), call.tensor(0).sizes().vec());
  const double low = call.number(1), high = call.number(2);
  give_to_self(call, hlo::binary("add", hlo::binary("multiply", u, fixed(u, high - low)), fixed(u, low)));
}

void normal(Call& call) {
  const auto u = uniform_numbers(generator_in(call, 3), call.tensor(0).sizes().vec());
  // Half a step from both ends, where the inverse of erf is infinite.
  const auto centred = hlo::binary("add", hlo::binary("multiply", u, fixed(u, 2)), fixed(u, 0x1p-24 - 1));
  const auto z = hlo::binary("multiply", hlo::unary("chlo.erf_inv", centred), fixed(u, std::numbers::sqrt2));
  give_to_self(call, hlo::binary("add", hlo::binary("multiply", z, fixed(z, call.number(2))), fixed(z, call.number(1))));
}

Value kept_with(double probability, const std::optional<at::Generator>& given, const Sizes& sizes) {
  const auto u = uniform_numbers(given, sizes);
  return hlo::compare("LT", u, hlo::full(probability, u.type()));
}

void bernoulli(Call& call) { give_to_self(call, kept_with(call.number(1), generator_in(call, 2), call.tensor(0).sizes().vec())); }

void dropout(Call& call) {
  const auto x = call.value(0);
  const double p = call.number(1);
  if (call.has(2) && !call.flag(2)) {
    call.give(std::vector{x, hlo::broadcast(hlo::constant(int64_t{1}, at::kBool), x.sizes(), {})});
    return;
  }
  const auto kept = kept_with(1 - p, std::nullopt, x.sizes());
  const auto scaled = hlo::binary("multiply", x, hlo::full(p == 1 ? 0 : 1 / (1 - p), x.type()));
  call.give(std::vector{hlo::select(kept, scaled, fixed(x, 0)), kept});
}

void dropout_gradient(Call& call) {
  const auto g = call.value(0);
  call.give(hlo::select(call.value(1, at::kBool), hlo::binary("multiply", g, hlo::full(call.number(2), g.type())), fixed(g, 0)));
}

const Kernel kRandom[] = {
    {"uniform_", uniform},
    {"normal_", normal},
    {"bernoulli_.float", bernoulli},
    {"native_dropout", dropout},
    {"native_dropout_backward", dropout_gradient},
};

}  // namespace

const at::Generator& device_generator() {
  static const auto& generator = *new at::Generator(at::make_generator<XlaGenerator>());
  return generator;
}

void register_random() { add_kernels(kRandom); }

}  // namespace tessera::xla
