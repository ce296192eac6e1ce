#include "tessera/xla/device/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"
#include "tessera/xla/graph/scan.h"

namespace tessera::xla {
namespace {

using hlo::fixed;
using hlo::minus;
using hlo::over;
using hlo::plus;
using hlo::times;

constexpr size_t kStateBytes = 16;
/// Replicas begin 2^54 places from each other in a stream of 2^64, so none reaches the start of another.
constexpr int kReplicaShift = 54;

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
  /// Returns the first replica's state as bytes on the CPU, as libtorch's own generators do. All replicas draw equally many numbers.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({static_cast<int64_t>(kStateBytes)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), replicas(const_cast<XlaGenerator&>(*this).state())[0].const_data_ptr(), kStateBytes);
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    if (state.dtype() != caffe2::TypeMeta::Make<uint8_t>() || static_cast<size_t>(state.numel()) != kStateBytes || !state.is_cpu()) {
      throw UsageError("the state of an XLA device's generator is {} bytes on the CPU", kStateBytes);
    }
    uint64_t numbers[2];
    std::memcpy(numbers, state.data(), kStateBytes);
    seed_ = numbers[0];
    state_ = from(numbers[1]);
  }
  /// Returns the state as a generator: it stays on the device, and nothing is read.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return clone(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto& other = dynamic_cast<XlaGenerator&>(*state);
    const auto lock = lock_device();
    seed_ = other.seed_;
    write(this->state(), read(other.state()));
  }
  static c10::DeviceType device_type() { return kXla; }

  at::Tensor& state() {
    if (!state_.defined()) state_ = from(0);
    return state_;
  }

 private:
  XlaGenerator* clone_impl() const override {
    const auto lock = lock_device();
    auto copy = std::make_unique<XlaGenerator>();
    copy->seed_ = seed_;
    copy->state_ = new_tensor(read(const_cast<XlaGenerator&>(*this).state()));
    return copy.release();
  }
  /// Makes the states of all replicas, with the first at `place`.
  at::Tensor from(uint64_t place) const {
    std::vector<at::Tensor> all;
    for (uint64_t replica = 0; replica < static_cast<uint64_t>(runner().replicas()); replica++) {
      all.push_back(at::empty({2}, at::kUInt64));
      all.back().mutable_data_ptr<uint64_t>()[0] = seed_;
      all.back().mutable_data_ptr<uint64_t>()[1] = place + (replica << kReplicaShift);
    }
    return from_replicas(all);
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  at::Tensor state_;
};

XlaGenerator& generator_of(const std::optional<at::Generator>& given) {
  const auto& generator = given && given->defined() ? *given : device_generator();
  if (generator.device().type() != kXla) {
    throw UsageError("an operator on xla got a generator of {}: make one for xla, or leave it out", generator.device().str());
  }
  return *static_cast<XlaGenerator*>(generator.unsafeGetGeneratorImpl());
}

/// The generator among the arguments, if there is one.
std::optional<at::Generator> generator_in(const Call& call) {
  for (size_t i = 0; i < call.arguments(); i++) {
    if (call.peek(i).isGenerator()) return call[i].toGenerator();
  }
  return std::nullopt;
}

Value random_bits(const Call& call, at::ScalarType element, const Sizes& sizes) {
  auto& state = generator_of(generator_in(call)).state();
  // Philox gives equal bits everywhere. On TPUs it takes ten times the memory of what is drawn.
  const auto* const algorithm = runner().platform() == "tpu" ? "DEFAULT" : "PHILOX";
  const auto [next, bits] = hlo::random_bits(read(state), {element, sizes}, algorithm);
  write(state, next);
  return bits;
}

/// Binary digits of the numbers of a type; those of a float where it is not floating-point.
int digits_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::digits;
    case at::kHalf:
      return std::numeric_limits<c10::Half>::digits;
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::digits;
    default:
      return std::numeric_limits<float>::digits;
  }
}

Value bits_for(const Call& call, const Sizes& sizes, at::ScalarType type) {
  return random_bits(call, type == at::kDouble ? at::kUInt64 : at::kUInt32, sizes);
}

/// The highest `count` bits as a whole number: a double of 64 bits, a float of 32.
Value highest_bits(const Value& bits, int count) {
  const bool wide = bits.element() == at::kUInt64;
  return hlo::convert(hlo::binary("shift_right_logical", bits, fixed(bits, (wide ? 64 : 32) - count)), wide ? at::kDouble : at::kFloat);
}

Value uniform_numbers(const Call& call, const Sizes& sizes, at::ScalarType type = at::kFloat) {
  return uniform_from(bits_for(call, sizes, type), type);
}
Value inner_numbers(const Call& call, const Sizes& sizes, at::ScalarType type = at::kFloat) {
  return inner_from(bits_for(call, sizes, type));
}
Value normal_numbers(const Call& call, const Sizes& sizes, at::ScalarType type = at::kFloat) {
  return normal_from(bits_for(call, sizes, type));
}

/// Numbers for an operator that fills its first argument: `of` makes them of the sizes and the type.
template <class Numbers>
Kernel filling(const char* name, Numbers of) {
  return {name, [of](Call& call) {
            const auto& self = call.tensor(0);
            call.give(hlo::convert(of(call, self.sizes().vec(), self.scalar_type()), self.scalar_type()));
          }};
}

Value argument(const Call& call, size_t i, const Value& like) {
  return hlo::like(like, call.number(i));
}

Value uniform(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto u = uniform_numbers(call, sizes, type);
  const auto low = argument(call, 1, u);
  return plus(times(u, minus(argument(call, 2, u), low)), low);
}

Value normal(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto z = normal_numbers(call, sizes, type);
  return plus(times(z, argument(call, 2, z)), argument(call, 1, z));
}

Value exponentially(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto u = inner_numbers(call, sizes, type);
  return hlo::negated(over(hlo::logarithm(u), argument(call, 1, u)));
}

Value cauchy(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto u = inner_numbers(call, sizes, type);
  const auto tangent = hlo::unary("tan", times(minus(u, fixed(u, 0.5)), fixed(u, std::numbers::pi)));
  return plus(argument(call, 1, u), times(argument(call, 2, u), tangent));
}

Value geometric(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto u = inner_numbers(call, sizes, type);
  return hlo::unary("ceil", over(hlo::logarithm(u), hlo::log_plus_one(hlo::negated(argument(call, 1, u)))));
}

/// Draws whole numbers from `low` to `low + count - 1`, or from all if `count` is 0.
Value whole_numbers(const Call& call, const Sizes& sizes, int64_t low, uint64_t count) {
  constexpr auto kHalf = uint64_t{1} << 63;
  if (count > kHalf) throw NotLowered();
  const bool wide = count == 0 || count > (uint64_t{1} << 32);
  auto bits = random_bits(call, wide ? at::kUInt64 : at::kUInt32, sizes);
  if (count == kHalf) {
    bits = hlo::binary("shift_right_logical", bits, fixed(bits, 1));
  } else if (count != 0 && count != uint64_t{1} << 32) {
    bits = hlo::binary("remainder", bits, fixed(bits, static_cast<int64_t>(count)));
  }
  const auto numbers = hlo::convert(bits, at::kLong);
  return plus(numbers, fixed(numbers, low));
}

/// The largest whole number up to which the type represents all.
int64_t largest_of(at::ScalarType type) {
  if (c10::isFloatingType(type)) return int64_t{1} << digits_of(type);
  if (type == at::kBool) return 1;
  return std::numeric_limits<int64_t>::max() >> (64 - 8 * static_cast<int>(c10::elementSize(type)) - (type == at::kByte ? 1 : 0));
}

Value whole(const Call& call, const Sizes& sizes, at::ScalarType type) {
  return whole_numbers(call, sizes, 0, static_cast<uint64_t>(largest_of(type)) + 1);
}
Value whole_between(const Call& call, const Sizes& sizes, int64_t low, int64_t end) {
  if (low >= end) throw UsageError("random whole numbers from {} up to {}, which is left out: there are none", low, end);
  return whole_numbers(call, sizes, low, static_cast<uint64_t>(end) - static_cast<uint64_t>(low));
}
Value whole_to(const Call& call, const Sizes& sizes, at::ScalarType /*type*/) {
  return whole_between(call, sizes, 0, call.integer(1));
}
Value whole_from(const Call& call, const Sizes& sizes, at::ScalarType type) {
  const auto low = call.integer(1);
  if (call.has(2)) return whole_between(call, sizes, low, call.integer(2));
  return whole_numbers(call, sizes, low, static_cast<uint64_t>(largest_of(type)) + 1 - static_cast<uint64_t>(low));
}

Value kept_with(const Call& call, double probability, const Sizes& sizes) {
  const auto u = uniform_numbers(call, sizes);
  return hlo::is_below(u, hlo::full(probability, u.type()));
}

/// The mean and the deviation are each a tensor or a number.
void normal_of(Call& call) {
  const auto type = call.result_type();
  Sizes sizes;
  for (size_t i = 0; i < 2; i++) {
    if (call[i].isTensor()) sizes = at::infer_size(sizes, call.tensor(i).sizes());
  }
  const auto z = normal_numbers(call, sizes, type);
  const auto part = [&](size_t i) { return call[i].isTensor() ? hlo::expand(call.value(i, z.element()), sizes) : argument(call, i, z); };
  call.give(hlo::convert(plus(times(z, part(1)), part(0)), type));
}

void permutation(Call& call) {
  const auto bits = random_bits(call, at::kUInt32, {call.integer(0)});
  call.give(hlo::convert(hlo::sort(bits, 0, hlo::Order::Ascending).second, call.result_type()));
}

/// Without replacement, each class waits for a random time, shorter if it weighs more, and the first classes are drawn. With replacement, a
/// number falls between running sums.
void multinomial(Call& call) {
  const auto weights = call.value(0, at::kFloat);
  const auto d = weights.rank() - 1, classes = weights.sizes().back(), count = call.integer(1);
  if (!call.flag(2)) {
    const auto waiting = hlo::negated(hlo::logarithm(inner_numbers(call, weights.sizes())));
    return call.give(hlo::slice(hlo::sort(over(weights, waiting), d, hlo::Order::Descending).second, d, 0, count));
  }
  auto sizes = weights.sizes(), pairs = sizes;
  sizes.back() = count;
  pairs.insert(pairs.end() - 1, count);
  auto rows = all_dimensions(d);
  const auto total = hlo::broadcast(hlo::sum(weights, {d}), sizes, rows);
  const auto draws = hlo::broadcast(times(uniform_numbers(call, sizes), total), pairs, all_dimensions(d + 1));
  rows.push_back(d + 1);
  const auto sums = hlo::broadcast(hlo::running(weights, d, Combine::Add), pairs, rows);
  const auto passed = hlo::sum(hlo::convert(hlo::compare("LE", sums, draws), at::kLong), {d + 1});
  call.give(hlo::smallest(passed, fixed(passed, classes - 1)));
}

void dropout(Call& call) {
  const auto x = call.value(0);
  const double p = call.number(1);
  if (call.has(2) && !call.flag(2)) {
    call.give(std::vector{x, hlo::broadcast(hlo::constant(int64_t{1}, at::kBool), x.sizes(), {})});
    return;
  }
  const auto kept = kept_with(call, 1 - p, x.sizes());
  const auto scaled = times(x, hlo::full(p == 1 ? 0 : 1 / (1 - p), x.type()));
  call.give(std::vector{hlo::select(kept, scaled, fixed(x, 0)), kept});
}

void dropout_gradient(Call& call) {
  const auto given = call.value(0), g = hlo::convert(given, fractional(given.element()));
  call.give(hlo::select(call.value(1, at::kBool), times(g, hlo::full(call.number(2), g.type())), fixed(g, 0)));
}

/// Multiplies numbers below 0 by a drawn slope, which goes to the noise, or in evaluation by the mean slope.
void leaky_with_noise(Call& call) {
  const auto x = call.wide_value(0), low = argument(call, 2, x), high = argument(call, 3, x);
  const auto is_low = hlo::compare("LE", x, fixed(x, 0));
  if (!call.flag(4))
    return call.give(hlo::convert(hlo::select(is_low, times(x, over(plus(low, high), fixed(x, 2))), x), call.result_type()));
  const auto u = hlo::convert(uniform_numbers(call, x.sizes()), x.element());
  const auto noise = hlo::select(is_low, plus(low, times(u, minus(high, low))), fixed(x, 1));
  write(call.tensor(1), noise);
  call.give(hlo::convert(times(x, noise), call.result_type()));
}

}  // namespace

Value uniform_from(const Value& bits, at::ScalarType type) {
  const auto digits = digits_of(type);
  const auto number = highest_bits(bits, digits);
  return times(number, fixed(number, std::ldexp(1, -digits)));
}

Value inner_from(const Value& bits) {
  const int digits = bits.element() == at::kUInt64 ? 52 : 23;  // one less than the type has, so that the half is exact
  const auto number = highest_bits(bits, digits);
  return times(plus(number, fixed(number, 0.5)), fixed(number, std::ldexp(1, -digits)));
}

Value normal_from(const Value& bits) {
  const auto u = inner_from(bits);
  const auto centred = minus(times(u, fixed(u, 2)), fixed(u, 1));
  return times(hlo::unary("chlo.erf_inv", centred), fixed(u, std::numbers::sqrt2));
}

const at::Generator& device_generator() {
  static const auto& generator = *new at::Generator(at::make_generator<XlaGenerator>());
  return generator;
}

void register_random() {
  const Kernel kernels[] = {
      filling("uniform_", uniform),
      filling("normal_", normal),
      filling("log_normal_",
              [](const Call& call, const Sizes& sizes, at::ScalarType type) { return hlo::exponential(normal(call, sizes, type)); }),
      filling("exponential_", exponentially),
      filling("cauchy_", cauchy),
      filling("geometric_", geometric),
      filling("random_", whole),
      filling("random_.to", whole_to),
      filling("random_.from", whole_from),
      filling("bernoulli_.float",
              [](const Call& call, const Sizes& sizes, at::ScalarType /*type*/) { return kept_with(call, call.number(1), sizes); }),
      filling("bernoulli_.Tensor",
              [](const Call& call, const Sizes& sizes, at::ScalarType /*type*/) {
                return hlo::is_below(uniform_numbers(call, sizes), hlo::expand(call.value(1, at::kFloat), sizes));
              }),
      {"normal.Tensor_float", normal_of},
      {"normal.float_Tensor", normal_of},
      {"normal.Tensor_Tensor", normal_of},
      {"randperm.generator_out", permutation},
      {"multinomial", multinomial},
      {"native_dropout", dropout},
      {"native_dropout_backward", dropout_gradient},
      {"rrelu_with_noise", leaky_with_noise},
  };
  add_kernels(kernels);
}

}  // namespace tessera::xla
