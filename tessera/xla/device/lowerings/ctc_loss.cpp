// The loss of connectionist temporal classification (CTC): sums the probabilities of all ways to align labels, with blanks between them, with
// time steps.
#include <ATen/ATen.h>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

constexpr auto kNever = -std::numeric_limits<double>::infinity();

/// The targets of a batch as states: a state for each label, for the blank before each label, and for the blank after the last label.
struct Labels {
  at::Tensor states;    // [batch, state]: the class that the state emits
  at::Tensor may_skip;  // [batch, state]: whether a path may skip the blank between the previous label and this one
  at::Tensor last;      // [batch]: the index of the last state
  at::Tensor steps;     // [batch]: the number of time steps of the input
  int64_t time = 0, batch = 0, count = 0;
};

at::Tensor on_device(const std::vector<int64_t>& numbers, const at::Tensor& like) {
  return at::tensor(numbers, at::kLong).to(like.device());
}

Labels labels_of(const at::Tensor& log_probs, const at::Tensor& targets, const std::vector<int64_t>& input_lengths,
                 const std::vector<int64_t>& lengths, int64_t blank) {
  Labels l;
  l.time = log_probs.size(0);
  l.batch = log_probs.size(1);
  int64_t longest = 0;
  for (const auto length : lengths) longest = std::max(longest, length);
  l.count = 2 * longest + 1;
  // The index of each state's label in `list`, the list of targets.
  std::vector<int64_t> places, lasts;
  std::vector<int64_t> is_label;
  int64_t begin = 0;
  for (const auto length : lengths) {
    for (int64_t state = 0; state < l.count; state++) {
      const bool label = state % 2 == 1 && state / 2 < length;
      places.push_back(label ? begin + state / 2 : 0);
      is_label.push_back(label);
    }
    lasts.push_back(2 * length);
    begin += targets.dim() == 1 ? length : targets.size(1);
  }
  const auto list = targets.reshape({-1}).to(at::kLong);
  const auto labels = list.numel() ? list.index_select(0, on_device(places, log_probs)) : on_device(places, log_probs);
  l.states = at::where(on_device(is_label, log_probs).to(at::kBool), labels, blank).view({l.batch, l.count});
  const auto two_before =
      at::constant_pad_nd(l.states.narrow(1, 0, std::max<int64_t>(l.count - 2, 0)), {std::min<int64_t>(l.count, 2), 0}, blank);
  l.may_skip = l.states.ne(blank).logical_and(l.states.ne(two_before));
  l.last = on_device(lasts, log_probs);
  l.steps = on_device(input_lengths, log_probs);
  return l;
}

/// Moves states by some places, towards the end or, if `by` is negative, the start; fills the free places with kNever.
at::Tensor moved(const at::Tensor& states, int64_t by) {
  const auto count = states.size(1), kept = std::max<int64_t>(count - std::abs(by), 0), in = count - kept;
  return by > 0 ? at::constant_pad_nd(states.narrow(1, 0, kept), {in, 0}, kNever)
                : at::constant_pad_nd(states.narrow(1, in, kept), {0, in}, kNever);
}

at::Tensor log_sum(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return at::logsumexp(at::stack({a, b, c}), 0);
}

/// Log probabilities of the classes that the states emit: [time, batch, state].
at::Tensor emissions(const at::Tensor& log_probs, const Labels& l) {
  return log_probs.gather(2, l.states.unsqueeze(0).expand({l.time, l.batch, l.count}));
}

at::Tensor is_end(const Labels& l) {
  const auto states = at::arange(l.count, l.last.options()).unsqueeze(0), last = l.last.unsqueeze(1);
  return states.eq(last).logical_or(states.eq(last - 1));
}

/// Returns alpha: for each time and state, the log probability of all paths from the start to that time that end in that state.
at::Tensor beginnings(const at::Tensor& emitted, const Labels& l) {
  const auto first = at::arange(l.count, l.last.options()).lt(2).expand({l.batch, l.count});
  auto alpha = at::where(first, emitted[0], kNever).to(emitted.scalar_type());
  std::vector<at::Tensor> all{alpha};
  for (int64_t t = 1; t < l.time; t++) {
    alpha = log_sum(alpha, moved(alpha, 1), at::where(l.may_skip, moved(alpha, 2), kNever).to(alpha.scalar_type())) + emitted[t];
    all.push_back(alpha);
  }
  return at::stack(all, 1);
}

/// Returns beta: for each time and state, the log probability of all paths from that time to the end that begin in that state, including
/// the state's own class.
std::vector<at::Tensor> ends(const at::Tensor& emitted, const Labels& l) {
  std::vector<at::Tensor> all(static_cast<size_t>(l.time));
  auto beta = at::full_like(emitted[0], kNever);
  const auto steps = l.steps.unsqueeze(1);
  const auto skips = at::constant_pad_nd(l.may_skip, {0, 2}, 0).narrow(1, 2, l.count);
  for (auto t = l.time - 1; t >= 0; t--) {
    const auto later = log_sum(beta, moved(beta, -1), at::where(skips, moved(beta, -2), kNever).to(beta.scalar_type()));
    const auto at_end = at::where(is_end(l), at::zeros_like(later), kNever).to(later.scalar_type());
    beta = at::where(steps.eq(t + 1), at_end, later) + emitted[t];
    all[static_cast<size_t>(t)] = beta;
  }
  return all;
}

void ctc_loss(Call& call) {
  const auto& log_probs = call.tensor(0);
  const auto l = labels_of(log_probs, call.tensor(1), call.integers(2), call.integers(3), call.integer(4));
  const auto alpha = beginnings(emissions(log_probs, l), l);
  const auto time = (l.steps - 1).clamp_min(0).view({-1, 1, 1}).expand({l.batch, 1, l.count});
  const auto final = at::where(is_end(l), alpha.gather(1, time).squeeze(1), kNever).to(alpha.scalar_type());
  auto loss = at::logsumexp(final, 1).neg();
  // An input without time steps can only be aligned with an empty target.
  loss = at::where(l.steps.gt(0), loss, at::where(l.last.gt(0), -kNever, 0.0)).to(alpha.scalar_type());
  call.give({read(loss), read(alpha)});
}

void ctc_loss_gradient(Call& call) {
  const auto &g = call.tensor(0), &log_probs = call.tensor(1), &alpha = call.tensor(6);
  const auto l = labels_of(log_probs, call.tensor(2), call.integers(3), call.integers(4), call.integer(7));
  const auto loss = call.tensor(5).view({1, -1, 1});
  const auto emitted = emissions(log_probs, l);
  // Log probabilities of all paths through a state. Alpha and beta both include the state's own class, so it is subtracted once.
  const auto through = alpha.transpose(0, 1) + at::stack(ends(emitted, l)) - emitted;
  const auto share = (through + loss).exp().nan_to_num(0);
  const auto by_class = at::zeros_like(log_probs).scatter_add(2, l.states.unsqueeze(0).expand({l.time, l.batch, l.count}), share);
  auto gradient = (log_probs.exp() - by_class) * g.view({1, -1, 1});
  const auto is_later = at::arange(l.time, l.last.options()).unsqueeze(1).ge(l.steps.unsqueeze(0)).unsqueeze(2);
  gradient = at::where(is_later, 0, gradient);
  if (call.flag(8)) gradient = at::where(loss.isinf(), 0, gradient);
  call.give(read(gradient.to(log_probs.scalar_type())));
}

}  // namespace

void register_ctc_loss() {
  add_kernels({
      {"_ctc_loss", ctc_loss},
      {"_ctc_loss_backward", ctc_loss_gradient},
  });
}

}  // namespace tessera::xla
