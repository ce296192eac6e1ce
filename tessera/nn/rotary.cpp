#include "tessera/nn/rotary.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/comm/simulation.h"
#include "tessera/nn/row_kernels.h"

namespace tessera::nn {
namespace {

constexpr int64_t kTokensAtOnce = 16;

/// Lowers the frequencies of wavelengths that are long compared to the texts of the original training, keeps those of short wavelengths,
/// and interpolates in between.
at::Tensor stretched(const at::Tensor& frequencies, const Llama3Scaling& scaling) {
  const auto old = static_cast<double>(scaling.original_max_position_embeddings);
  const auto wavelengths = 2 * std::numbers::pi / frequencies;
  const auto share = (old / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const auto mixed = (1 - share) * frequencies / scaling.factor + share * frequencies;
  const auto is_long = wavelengths > old / scaling.low_freq_factor, is_short = wavelengths < old / scaling.high_freq_factor;
  return at::where(is_long, frequencies / scaling.factor, at::where(is_short, frequencies, mixed));
}

at::Tensor stretched_by_yarn(const at::Tensor& frequencies, const YarnScaling& scaling, double theta) {
  const auto size = 2 * static_cast<double>(frequencies.numel()), old = static_cast<double>(scaling.original_max_position_embeddings);
  // The pair, as a real number, that turns this often within the original length.
  const auto pair_of = [&](double turns) { return size * std::log(old / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta)); };
  auto low = pair_of(scaling.beta_fast), high = pair_of(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, size - 1);
  if (low == high) high += 0.001;
  const auto share = ((at::arange(frequencies.numel(), frequencies.options()) - low) / (high - low)).clamp(0, 1);
  return frequencies / scaling.factor * share + frequencies * (1 - share);
}

/// The divisors of frequencies. Reads no value of `positions` on the host.
at::Tensor divisors_of(const LongRopeScaling& scaling, const at::Tensor& positions, const at::TensorOptions& floats) {
  const auto as_tensor = [&](const std::vector<double>& factors) { return at::tensor(factors, at::kFloat).to(floats.device()); };
  if (positions.numel() == 0) return as_tensor(scaling.short_factor);
  return at::where(positions.max() >= scaling.original_max_position_embeddings, as_tensor(scaling.long_factor),
                   as_tensor(scaling.short_factor));
}

/// Turns by operators, for devices other than the CPU, for dtypes that the kernels lack, and where the result is differentiated.
at::Tensor turned(const at::Tensor& x, const RotaryTable& table, double direction) {
  const auto pairs = table.cos.size(-1);
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto cos = table.cos.unsqueeze(2).to(dtype), sin = (table.sin.unsqueeze(2) * direction).to(dtype);
  const auto first = x.narrow(-1, 0, pairs).to(dtype), second = x.narrow(-1, pairs, pairs).to(dtype);
  const auto rest = x.narrow(-1, 2 * pairs, x.size(-1) - 2 * pairs).to(dtype);
  return at::cat({first * cos - second * sin, second * cos + first * sin, rest}, -1).to(x.scalar_type());
}

template <class T>
Heads<T> heads_of(const at::Tensor& x, T* values) {
  return {values, x.stride(0), x.stride(1), x.stride(2)};
}

/// Turns x, {batch, length, heads, size}, and writes the result to `to`, which has the same sizes.
void turn_on_cpu(const at::Tensor& x, const RotaryTable& table, double direction, const at::Tensor& to) {
  if (auto* const simulation = Simulation::current()) return simulation->pass_over(2 * to.nbytes());
  const auto cos = table.cos.to(at::kFloat).contiguous(), sin = table.sin.to(at::kFloat).contiguous();
  const auto act = [&]<class T>(T* from, T* values) {
    const Rotation<T> rotation{.from = heads_of<const T>(x, from),
                               .to = heads_of<T>(to, values),
                               .cos = cos.data_ptr<float>(),
                               .sin = sin.data_ptr<float>(),
                               .batch_of_table = cos.size(0) == 1 ? 0 : cos.stride(0),
                               .length = x.size(1),
                               .heads = x.size(2),
                               .size = x.size(3),
                               .pairs = cos.size(-1),
                               .direction = static_cast<float>(direction)};
    at::parallel_for(0, x.size(0) * x.size(1), kTokensAtOnce, [&](int64_t begin, int64_t end) { run(rotation, begin, end); });
  };
  if (x.scalar_type() == at::kFloat) return act(x.data_ptr<float>(), to.data_ptr<float>());
  act(static_cast<uint16_t*>(x.data_ptr()), static_cast<uint16_t*>(to.data_ptr()));
}

/// Turns x, {batch, length, heads, size}. In the memory of the result, heads come before length if `heads_first`, else length before heads.
at::Tensor turn(const at::Tensor& x, const RotaryTable& table, double direction, bool heads_first) {
  const bool is_recorded = c10::GradMode::is_enabled() && x.requires_grad();  // in a backward pass with create_graph
  const bool fits = x.device().is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
  if (!fits || is_recorded) return turned(x, table, direction);
  const auto from = x.stride(-1) == 1 ? x : x.contiguous();
  const auto to = heads_first ? at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2)
                              : at::empty(x.sizes(), x.options());
  turn_on_cpu(from, table, direction, to);
  return to;
}

struct Rotate : torch::autograd::Function<Rotate> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return turn(x, {cos, sin}, 1, /*heads_first=*/true).transpose(1, 2).contiguous();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {turn(grads[0].transpose(1, 2), {saved[0], saved[1]}, -1, /*heads_first=*/false), {}, {}};
  }
};

/// Throws UsageError if the table does not fit x: the loops trust the sizes of both, and would read and write beyond the end.
void expect_fit(const at::Tensor& x, const RotaryTable& table) {
  const auto &cos = table.cos, &sin = table.sin;
  if (!x.defined() || !cos.defined() || !sin.defined())
    throw UsageError("rotary embeddings: undefined tensors; nn::rotary_table makes a table");
  const bool fits = x.dim() == 4 && cos.dim() == 3 && sin.sizes() == cos.sizes() && (cos.size(0) == 1 || cos.size(0) == x.size(0)) &&
                    cos.size(1) == x.size(1) && 2 * cos.size(2) <= x.size(3);
  if (!fits) {
    throw UsageError(
        "rotary embeddings: a table of [{}] and [{}] does not fit values of [{}]; for values of {{batch, length, heads, size}} it must "
        "have "
        "{{1 or batch, length, pairs}}, with at most size / 2 pairs",
        joined(cos.sizes()), joined(sin.sizes()), joined(x.sizes()));
  }
  if (cos.device() != x.device() || sin.device() != x.device())
    throw UsageError("rotary embeddings: a table on {} for values on {}; make it of positions there", cos.device().str(), x.device().str());
  if (c10::GradMode::is_enabled() && (cos.requires_grad() || sin.requires_grad()))
    throw UsageError("rotary embeddings: a table gets no gradient; detach it, or turn the values by libtorch's operators");
}

}  // namespace

int64_t rotary_size(const RotaryOptions& options, int64_t head_size) {
  return static_cast<int64_t>(static_cast<double>(head_size) * options.partial_rotary_factor);
}

double usual_attention_factor(const RotaryOptions& options, int64_t longest) {
  if (options.yarn) return options.yarn->factor <= 1 ? 1 : 0.1 * std::log(options.yarn->factor) + 1;
  if (!options.longrope) return 1;
  const auto old = static_cast<double>(options.longrope->original_max_position_embeddings), factor = static_cast<double>(longest) / old;
  return factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(old));
}

RotaryTable rotary_table(const RotaryOptions& options, int64_t head_size, const at::Tensor& positions) {
  const auto size = rotary_size(options, head_size);
  if (size < 2 || size % 2 != 0 || size > head_size) {
    throw UsageError("rotary embeddings: {} of the {} values of a head can't be turned in pairs", size, head_size);
  }
  const auto floats = positions.options().dtype(at::kFloat);
  const auto exponents = at::arange(0, size, 2, floats) / static_cast<double>(size);
  auto frequencies = 1 / at::pow(options.theta, exponents);
  if (options.llama3) {
    frequencies = stretched(frequencies, *options.llama3);
  } else if (options.yarn) {
    frequencies = stretched_by_yarn(frequencies, *options.yarn, options.theta);
  } else if (options.longrope) {
    frequencies = frequencies / divisors_of(*options.longrope, positions, floats);
  } else if (options.factor != 1) {
    frequencies = frequencies / options.factor;
  }
  const auto angles = positions.to(at::kFloat).unsqueeze(-1) * frequencies;
  const RotaryTable table{at::cos(angles), at::sin(angles)};
  if (options.attention_factor == 1) return table;
  return {table.cos * options.attention_factor, table.sin * options.attention_factor};
}

at::Tensor rotary(const at::Tensor& x, const RotaryTable& table) {
  expect_fit(x, table);
  return Rotate::apply(x, table.cos, table.sin);
}

}  // namespace tessera::nn
