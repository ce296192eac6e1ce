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

constexpr size_t kStateBytes = 16;
/// Replica r begins at place r * 2^54 of a stream of 2^64 numbers, so that no replica draws the numbers of another.
constexpr int kReplicaShift = 54;

/// The state is two numbers for each replica, the seed and the place in the stream, in a tensor on the device.
class XlaGenerator final : public c10::GeneratorImpl {
 public:
  XlaGenerator() : GeneratorImpl(c10::Device(kXla, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    state_ = at::Tensor();  // state() makes it when it is needed: libtorch seeds before the first tensor
  }
  void set_offset(uint64_t /*offset*/) override { throw UsageError("the generator of an XLA device has no offset: use set_state()"); }
  uint64_t get_offset() const override { throw UsageError("the generator of an XLA device has no offset: use get_state()"); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  /// Returns the first replica's state as bytes on the CPU, as libtorch's own generators do. It determines the states of the other
  /// replicas, because all replicas draw equally many numbers.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({static_cast<int64_t>(kStateBytes)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), replicas(const_cast<XlaGenerator&>(*this).state())[0].const_data_ptr(), kStateBytes);
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    if (state.dtype() != caffe2::TypeMeta::Make<uint8_t>() || static_cast<size_t>(state.numel()) != kStateBytes || !state.is_cpu()) {
      throw UsageError("the state of an XLA device's generator must be a uint8 tensor of {} bytes on the CPU", kStateBytes);
    }
    uint64_t numbers[2];
    std::memcpy(numbers, state.data(), kStateBytes);
    seed_ = numbers[0];
    state_ = from(numbers[1]);
  }
  /// Returns a copy of the generator as its state, which stays on the device, so that the host reads nothing.
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
  /// Makes the states of all replicas, with the first replica's state at `place` of the stream.
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
    throw UsageError("an operator on xla got a generator of {}: give a generator of xla, or none", generator.device().str());
  }
  return *static_cast<XlaGenerator*>(generator.unsafeGetGeneratorImpl());
}

/// Returns the generator among the arguments, or nothing if there is none.
std::optional<at::Generator> generator_in(const Call& call) {
  for (size_t i = 0; i < call.arguments(); i++) {
    if (call.peek(i).isGenerator()) return call[i].toGenerator();
  }
  return std::nullopt;
}

/// How many binary digits the numbers of a type have.
int digits_of(at::ScalarType type) {
  return of_floating_type(type, [](auto number) { return std::numeric_limits<decltype(number)>::digits; });
}

/// Returns the highest `count` bits of each element as a whole number: as double for 64-bit elements, as float for 32-bit elements.
Value highest_bits(const Value& bits, int count) {
  const bool wide = bits.element() == at::kUInt64;
  return convert(binary("shift_right_logical", bits, fixed(bits, (wide ? 64 : 32) - count)), wide ? at::kDouble : at::kFloat);
}

/// Draws numbers for a call of an operator.
struct Draw {
  const Call& call;
  Sizes sizes;
  at::ScalarType type = at::kFloat;

  Value bits(at::ScalarType element) const {
    auto& state = generator_of(generator_in(call)).state();
    // Philox gives equal bits on all devices, but on TPUs it takes ten times the memory of the numbers that it draws.
    const auto* const algorithm = runner().platform() == "tpu" ? "DEFAULT" : "PHILOX";
    const auto [next, bits] = random_bits(read(state), {element, sizes}, algorithm);
    write(state, next);
    return bits;
  }
  Value bits() const { return bits(type == at::kDouble ? at::kUInt64 : at::kUInt32); }
  Value uniform() const { return uniform_from(bits(), type); }
  Value inner() const { return inner_from(bits()); }
  Value normal() const { return normal_from(bits()); }
};

/// Lowers an operator that fills its first argument: `of` draws numbers of that argument's sizes and type.
template <class Numbers>
Lowering filling(Numbers of) {
  return [of](Call& call) {
    const auto type = call.tensor(0).scalar_type();
    call.give(convert(of(Draw{call, call.tensor(0).sizes().vec(), type}), type));
  };
}

Value argument(const Call& call, size_t i, const Value& like) {
  return hlo::like(like, call.number(i));
}

Value uniform(const Draw& draw) {
  const auto u = draw.uniform();
  const auto low = argument(draw.call, 1, u);
  return u * (argument(draw.call, 2, u) - low) + low;
}

Value normal(const Draw& draw) {
  const auto z = draw.normal();
  return z * argument(draw.call, 2, z) + argument(draw.call, 1, z);
}

Value exponentially(const Draw& draw) {
  const auto u = draw.inner();
  return -(logarithm(u) / argument(draw.call, 1, u));
}

Value cauchy(const Draw& draw) {
  const auto u = draw.inner();
  const auto tangent = unary("tan", (u - 0.5) * std::numbers::pi);
  return argument(draw.call, 1, u) + argument(draw.call, 2, u) * tangent;
}

Value geometric(const Draw& draw) {
  const auto u = draw.inner();
  return unary("ceil", logarithm(u) / log_plus_one(-argument(draw.call, 1, u)));
}

/// Draws whole numbers from `low` to `low + count - 1`, or from all 64-bit numbers if `count` is 0.
Value whole_numbers(const Draw& draw, int64_t low, uint64_t count) {
  constexpr auto kHalf = uint64_t{1} << 63;
  if (count > kHalf) throw NotLowered();
  const bool wide = count == 0 || count > (uint64_t{1} << 32);
  auto bits = draw.bits(wide ? at::kUInt64 : at::kUInt32);
  if (count == kHalf) {
    bits = binary("shift_right_logical", bits, 1);
  } else if (count != 0 && count != uint64_t{1} << 32) {
    bits = binary("remainder", bits, static_cast<int64_t>(count));
  }
  return convert(bits, at::kLong) + low;
}

/// Returns the largest n for which the type represents every whole number from 0 to n.
int64_t largest_of(at::ScalarType type) {
  if (c10::isFloatingType(type)) return int64_t{1} << digits_of(type);
  if (type == at::kBool) return 1;
  return std::numeric_limits<int64_t>::max() >> (64 - 8 * static_cast<int>(c10::elementSize(type)) - (type == at::kByte ? 1 : 0));
}

Value whole_up_to_largest(const Draw& draw, int64_t low) {
  return whole_numbers(draw, low, static_cast<uint64_t>(largest_of(draw.type)) + 1 - static_cast<uint64_t>(low));
}
Value whole(const Draw& draw) {
  return whole_up_to_largest(draw, 0);
}
Value whole_between(const Draw& draw, int64_t low, int64_t end) {
  if (low >= end) throw UsageError("there are no whole numbers to draw that are at least {} and less than {}: give a larger end", low, end);
  return whole_numbers(draw, low, static_cast<uint64_t>(end) - static_cast<uint64_t>(low));
}
Value whole_to(const Draw& draw) {
  return whole_between(draw, 0, draw.call.integer(1));
}
Value whole_from(const Draw& draw) {
  const auto low = draw.call.integer(1);
  return draw.call.has(2) ? whole_between(draw, low, draw.call.integer(2)) : whole_up_to_largest(draw, low);
}

Value kept_with(const Draw& draw, double probability) {
  const auto u = uniform_from(draw.bits(at::kUInt32), at::kFloat);
  return u < hlo::full(probability, u.type());
}

/// The mean and the deviation are each a tensor or a number.
void normal_of(Call& call) {
  const auto type = call.result_type();
  Sizes sizes;
  for (size_t i = 0; i < 2; i++) {
    if (call[i].isTensor()) sizes = at::infer_size(sizes, call.tensor(i).sizes());
  }
  const auto z = Draw{call, sizes, type}.normal();
  const auto part = [&](size_t i) { return call[i].isTensor() ? expand(call.value(i, z.element()), sizes) : argument(call, i, z); };
  call.give(convert(z * part(1) + part(0), type));
}

void permutation(Call& call) {
  const auto bits = Draw{call, {call.integer(0)}}.bits();
  call.give_rounded(sort(bits, 0, hlo::Order::Ascending).second);
}

/// Without replacement, each class gets a random waiting time, shorter if its weight is larger, and the classes with the shortest times are
/// drawn. With replacement, a uniform number falls between two running sums of the weights.
void multinomial(Call& call) {
  const auto weights = call.value(0, at::kFloat);
  const auto d = weights.rank() - 1, classes = weights.sizes().back(), count = call.integer(1);
  if (!call.flag(2)) {
    const auto waiting = -logarithm(Draw{call, weights.sizes()}.inner());
    return call.give(slice(sort(weights / waiting, d, hlo::Order::Descending).second, d, 0, count));
  }
  auto sizes = weights.sizes(), pairs = sizes;
  sizes.back() = count;
  pairs.insert(pairs.end() - 1, count);
  auto rows = all_dimensions(d);
  const auto total = broadcast(sum(weights, {d}), sizes, rows);
  const auto draws = broadcast(Draw{call, sizes}.uniform() * total, pairs, all_dimensions(d + 1));
  rows.push_back(d + 1);
  const auto sums = broadcast(running(weights, d, Combine::Add), pairs, rows);
  const auto passed = sum(convert(sums <= draws, at::kLong), {d + 1});
  call.give(smallest(passed, classes - 1));
}

void dropout(Call& call) {
  const auto x = call.value(0);
  const double p = call.number(1);
  if (call.has(2) && !call.flag(2)) {
    call.give({x, hlo::filled(1, {at::kBool, x.sizes()})});
    return;
  }
  const auto kept = kept_with({call, x.sizes()}, 1 - p);
  const auto scaled = x * hlo::full(p == 1 ? 0 : 1 / (1 - p), x.type());
  call.give({select(kept, scaled, 0), kept});
}

void dropout_gradient(Call& call) {
  const auto given = call.value(0), g = convert(given, fractional(given.element()));
  call.give(select(call.value(1, at::kBool), g * hlo::full(call.number(2), g.type()), 0));
}

/// Multiplies numbers that are not positive by a random slope, which it also writes to the noise argument; in evaluation, by the mean
/// slope.
void leaky_with_noise(Call& call) {
  const auto x = call.wide_value(0), low = argument(call, 2, x), high = argument(call, 3, x);
  const auto is_low = x <= 0;
  if (!call.flag(4)) return call.give_rounded(select(is_low, x * ((low + high) / 2), x));
  const auto u = convert(Draw{call, x.sizes()}.uniform(), x.element());
  const auto noise = select(is_low, low + u * (high - low), 1);
  write(call.tensor(1), noise);
  call.give_rounded(x * noise);
}

}  // namespace

Value uniform_from(const Value& bits, at::ScalarType type) {
  const auto digits = digits_of(type);
  const auto number = highest_bits(bits, digits);
  return number * std::ldexp(1, -digits);
}

Value inner_from(const Value& bits) {
  const int digits = bits.element() == at::kUInt64 ? 52 : 23;  // one digit less than the type has, so that adding 0.5 is exact
  const auto number = highest_bits(bits, digits);
  return (number + 0.5) * std::ldexp(1, -digits);
}

Value normal_from(const Value& bits) {
  const auto u = inner_from(bits);
  const auto centred = u * 2 - 1;
  return unary("chlo.erf_inv", centred) * std::numbers::sqrt2;
}

const at::Generator& device_generator() {
  static const auto& generator = *new at::Generator(at::make_generator<XlaGenerator>());
  return generator;
}

void register_random() {
  add_kernels({
      {"uniform_", filling(uniform)},
      {"normal_", filling(normal)},
      {"log_normal_", filling([](const Draw& draw) { return exponential(normal(draw)); })},
      {"exponential_", filling(exponentially)},
      {"cauchy_", filling(cauchy)},
      {"geometric_", filling(geometric)},
      {"random_", filling(whole)},
      {"random_.to", filling(whole_to)},
      {"random_.from", filling(whole_from)},
      {"bernoulli_.float", filling([](const Draw& draw) { return kept_with(draw, draw.call.number(1)); })},
      {"bernoulli_.Tensor", filling([](const Draw& draw) {
         return Draw{draw.call, draw.sizes}.uniform() < expand(draw.call.value(1, at::kFloat), draw.sizes);
       })},
      {"normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", normal_of},
      {"randperm.generator_out", permutation},
      {"multinomial", multinomial},
      {"native_dropout", dropout},
      {"native_dropout_backward", dropout_gradient},
      {"rrelu_with_noise", leaky_with_noise},
  });
}

}  // namespace tessera::xla
