#include "tessera/shard/dispatch/operators.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <unordered_set>

namespace tessera {
namespace {

using Names = std::unordered_set<std::string_view>;

/// Elementwise operators that libtorch does not tag as such.
const Names& untagged() {
  static const Names names = {"aten::copy_",         "aten::zero_",        "aten::fill_",
                              "aten::masked_fill",   "aten::masked_fill_", "aten::_fused_adam_",
                              "aten::_fused_adamw_", "aten::_fused_sgd_",  "aten::_fused_adagrad_"};
  return names;
}

bool is_elementwise(const c10::OperatorHandle& handle, const std::string& name) {
  if (untagged().contains(name)) return true;
  return handle.hasTag(at::Tag::pointwise) && !handle.hasTag(at::Tag::data_dependent_output);
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.arguments().empty()) return false;
  const auto* alias = schema.arguments().front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

bool can_be_deferred(const c10::OperatorHandle& handle, const c10::FunctionSchema& schema) {
  if (handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape)) return false;
  return std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

std::optional<size_t> place_of(c10::TypeKind kind, const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto type = schema.arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == kind) return i;
  }
  return std::nullopt;
}

struct KnownOperator {
  const c10::Argument* arguments;  // distinguishes operators whose schemas had the same address, one after its library was unloaded
  OperatorFacts facts;
  KnownOperator* next;
};

/// A hash table of linked lists. Entries are only ever added, at the heads, so readers need no lock.
class Table {
 public:
  const OperatorFacts& find(const c10::OperatorHandle& handle) {
    const auto& schema = handle.schema();
    auto& head = heads_[(reinterpret_cast<uintptr_t>(&schema) >> 6) % heads_.size()];
    auto* const first = head.load(std::memory_order_acquire);
    for (const auto* entry = first; entry != nullptr; entry = entry->next) {
      if (entry->facts.schema == &schema && entry->arguments == schema.arguments().data()) return entry->facts;
    }
    auto* const made = new KnownOperator{.arguments = schema.arguments().data(), .facts = OperatorFacts(handle), .next = first};
    // If two threads add the same operator, it has two equal entries.
    while (!head.compare_exchange_weak(made->next, made, std::memory_order_release)) {
    }
    return made->facts;
  }

 private:
  std::array<std::atomic<KnownOperator*>, 1024> heads_ = {};
};

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& handle)
    : schema(&handle.schema()),
      arguments(schema->arguments().size()),
      views(is_view(*schema)),
      elementwise(is_elementwise(handle, name()) || name() == "aten::_is_any_true"),
      random(handle.hasTag(at::Tag::nondeterministic_seeded)),
      inspects(name() == "aten::_is_any_true"),
      composite(handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)),
      marks(Names{"aten::requires_grad_", "aten::retain_grad", "aten::detach_", "aten::rename_", "aten::set_data"}.contains(name())),
      by_parts(name().starts_with("aten::") && !handle.hasKernelForDispatchKey(c10::DispatchKey::CPU)),
      recurrent(Names{"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}.contains(name())),
      sets_storage(name() == "aten::set_" && schema->overload_name() == "source_Tensor"),
      rebinds(name() == "aten::set_" || name() == "aten::resize_"),
      compares_kinds(name() == "aten::_has_compatible_shallow_copy_type"),
      clones(name() == "aten::clone"),
      updates_statistics(
          Names{"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit"}.contains(name())),
      backward(name().ends_with("_backward")),
      composed(by_parts && (handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                            place_of(c10::TypeKind::DeviceObjType, *schema))),
      needs_values(!can_be_deferred(handle, *schema)),
      replaces(Names{"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_",
                     "aten::cauchy_", "aten::log_normal_", "aten::geometric_", "aten::bernoulli_"}
                   .contains(name())),
      device(place_of(c10::TypeKind::DeviceObjType, *schema)),
      generator(place_of(c10::TypeKind::GeneratorType, *schema)) {
  for (size_t i = 0; i < arguments; i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    writes.push_back(alias != nullptr && alias->isWrite());
  }
}

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
  // Never destroyed, because operators also run after main.
  static auto* const table = new Table;
  return table->find(handle);
}

}  // namespace tessera
