#include "tessera/shard/operators.h"

#include <array>
#include <atomic>
#include <string_view>
#include <unordered_set>

namespace tessera {
namespace {

using Names = std::unordered_set<std::string_view>;

const Names& mixing() {
  // Norms, sums, orders, products of matrices.
  static const Names names = {"aten::norm",
                              "aten::linalg_norm",
                              "aten::linalg_vector_norm",
                              "aten::linalg_matrix_norm",
                              "aten::_foreach_norm",
                              "aten::sum",
                              "aten::nansum",
                              "aten::frobenius_norm",
                              "aten::nanmean",
                              "aten::mean",
                              "aten::prod",
                              "aten::max",
                              "aten::min",
                              "aten::amax",
                              "aten::amin",
                              "aten::aminmax",
                              "aten::std",
                              "aten::var",
                              "aten::std_mean",
                              "aten::var_mean",
                              "aten::dot",
                              "aten::vdot",
                              "aten::cat",
                              "aten::_foreach_max",
                              "aten::median",
                              "aten::nanmedian",
                              "aten::quantile",
                              "aten::logsumexp",
                              "aten::softmax",
                              "aten::log_softmax",
                              "aten::cumsum",
                              "aten::cumprod",
                              "aten::sort",
                              "aten::topk",
                              "aten::argmax",
                              "aten::argmin",
                              "aten::kthvalue",
                              "aten::stack",
                              "aten::mm",
                              "aten::matmul",
                              "aten::addmm",
                              "aten::bmm",
                              "aten::baddbmm",
                              "aten::mv",
                              "aten::einsum",
                              "aten::linear",
                              "aten::linalg_qr",
                              "aten::linalg_svd",
                              "aten::linalg_eigh",
                              "aten::linalg_inv",
                              "aten::count_nonzero"};
  return names;
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.arguments().empty()) return false;
  const auto* alias = schema.arguments().front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

struct Entry {
  const c10::Argument* arguments;  // so that an operator of a library that was unloaded is not taken for one that came to its place
  OperatorFacts facts;
  Entry* next;
};

/// Lists that only grow, at their heads.
class Table {
 public:
  const OperatorFacts& find(const c10::OperatorHandle& handle) {
    const auto& schema = handle.schema();
    auto& head = heads_[(reinterpret_cast<uintptr_t>(&schema) >> 6) % heads_.size()];
    auto* const first = head.load(std::memory_order_acquire);
    for (const auto* entry = first; entry != nullptr; entry = entry->next) {
      if (entry->facts.schema == &schema && entry->arguments == schema.arguments().data()) return entry->facts;
    }
    auto* const made = new Entry{.arguments = schema.arguments().data(), .facts = OperatorFacts(handle), .next = first};
    // Where another thread was faster, the operator is there twice, and equal.
    while (!head.compare_exchange_weak(made->next, made, std::memory_order_release)) {
    }
    return made->facts;
  }

 private:
  std::array<std::atomic<Entry*>, 1024> heads_ = {};
};

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& handle)
    : schema(&handle.schema()),
      arguments(schema->arguments().size()),
      views(is_view(*schema)),
      mixes(mixing().contains(name())),
      penalizes(Names{"aten::pow", "aten::square", "aten::mul", "aten::abs", "aten::sub", "aten::add"}.contains(name())),
      recurrent(Names{"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}.contains(name())),
      sets_storage(name() == "aten::set_" && schema->overload_name() == "source_Tensor"),
      rebinds(name() == "aten::set_" || name() == "aten::resize_"),
      compares_kinds(name() == "aten::_has_compatible_shallow_copy_type"),
      clones(name() == "aten::clone"),
      updates_statistics(
          Names{"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit"}.contains(name())),
      backward(name().ends_with("_backward")) {
  for (size_t i = 0; i < arguments; i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    writes.push_back(alias != nullptr && alias->isWrite());
  }
}

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
  // As long as the process: operators run after main, too.
  static auto* const table = new Table;
  return table->find(handle);
}

}  // namespace tessera
