#include "tessera/shard/deferred/recording.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <span>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/storage/storage_tag.h"

namespace tessera {
namespace {

thread_local std::shared_ptr<Tape> tape_of_thread;

/// Facts about the operands of an operator.
struct Seen {
  std::vector<at::Tensor> deferred = {};
  at::Tensor written = {};     // the first deferred operand that is changed
  bool anything = false;       // whether there is an operand
  bool sharded = false;        // whether an operand belongs to a unit
  bool values = false;         // whether an operand has values
  bool writes_values = false;  // whether an operand with values is changed
  bool has_changed = false;  // whether an operand has got its values since it was last used, so that dispatch keys have to be computed anew
};

/// Allows operators on the meta device to compare pointers of deferred tensors, by which they see whether operands overlap.
class Unguarded : NoCopy {
 public:
  explicit Unguarded(std::span<const at::Tensor> tensors) : tensors_(tensors) {
    for (const auto& tensor : tensors_) compat::unguard_storage(*deferred_storage(tensor));
  }
  ~Unguarded() {
    for (const auto& tensor : tensors_) compat::guard_storage(*deferred_storage(tensor));
  }

 private:
  const std::span<const at::Tensor> tensors_;
};

class Recorder {
 public:
  Recorder(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack* stack)
      : handle_(handle), op_(op), below_(below), stack_(*stack), base_(stack->size() - op.arguments) {}

  bool run() {
    auto seen = look();
    if (seen.sharded) return false;
    const auto& tape = Recording::tape();
    if (tape == nullptr && seen.deferred.empty() && !seen.has_changed) return false;
    if (op_.compares_kinds) take_memory(seen);
    if (tape == nullptr) give_to_free(seen);
    const bool reads_nothing = op_.compares_kinds || op_.views || is_set();
    if (seen.has_changed) {
      handle_.callBoxed(&stack_);
    } else if (reads_nothing) {
      handle_.redispatchBoxed(below_, &stack_);
    } else if (const auto unknown = std::ranges::find_if_not(seen.deferred, has_recipe); unknown != seen.deferred.end()) {
      refuse(*unknown);
    } else if (tape != nullptr) {
      run_inside(seen, tape_for(seen, tape));
    } else {
      run_outside(seen);
    }
    return true;
  }

 private:
  template <class Visit>
  void for_each(Visit&& visit) const {
    for_each_operand(stack_, base_, visit);
  }

  /// set_ gives a tensor another storage, whose values are looked up only when the tensor is used.
  bool is_set() const { return op_.name() == "aten::set_"; }

  Seen look() const {
    Seen seen;
    for_each([&](size_t argument, size_t, const at::Tensor& tensor) {
      seen.anything = true;
      auto* const storage = deferred_storage(tensor);
      const bool writes = op_.writes[argument];
      if (storage == nullptr) {
        seen.sharded = seen.sharded || tag_of(tensor) != nullptr;
        seen.values = true;
        seen.writes_values = seen.writes_values || writes;
      } else if (storage->abandoned) {
        (void)storage->data();  // throws, because FormerMemory has guarded it
      } else if (storage->values) {
        seen.has_changed = follow_values(tensor);
      } else {
        seen.deferred.push_back(tensor);
        if (writes && !seen.written.defined()) seen.written = tensor;
      }
    });
    return seen;
  }

  /// set_data may give a deferred tensor memory with values, as torch::load does.
  void take_memory(Seen& seen) const {
    const auto& self = stack_[base_].toTensor();
    const auto& other = stack_[base_ + 1].toTensor();
    if (deferred_storage(self) == nullptr || lacks_values(other) || self.sizes() != other.sizes()) return;
    give_values(self, other);
    seen.deferred.clear();
    seen.has_changed = true;
  }

  /// Computes the values of tensors that are neither parameters nor buffers, which no other code would give them.
  static void give_to_free(Seen& seen) {
    for (const auto& tensor : seen.deferred) {
      auto& storage = *deferred_storage(tensor);
      if (storage.kind != DeferredStorage::Kind::Free) continue;
      if (!storage.values) {
        const c10::impl::ExcludeDispatchKeyGuard excluded(kPagingKey);
        const auto all = at::empty({static_cast<int64_t>(storage.nbytes())}, at::TensorOptions(c10::kMeta).dtype(at::kByte));
        storage.values = storage.tape->replay(on_tape(all, storage)).storage();
      }
      seen.has_changed = follow_values(tensor);
    }
  }

  /// Runs an operator outside of deferred_init, where deferred tensors may be changed, converted and copied, but not computed with.
  void run_outside(const Seen& seen) {
    if (op_.needs_values || seen.writes_values || (seen.values && !seen.written.defined())) refuse(seen.deferred.front());
    const auto& first = *deferred_storage(seen.deferred.front());
    {
      const auto tape = tape_for(seen, first.tape);
      const Recording recording(tape);
      run_inside(seen, tape);
    }
    for_each_operand(stack_, stack_.size() - op_.schema->returns().size(), [&](size_t, size_t, const at::Tensor& result) {
      auto* const made = deferred_storage(result);
      if (made == nullptr) return;
      if (made->kind == DeferredStorage::Kind::Free) {
        made->kind = first.kind;
        made->name = first.name;
      }
      made->tape->name(made->number, made->name);
    });
  }

  [[noreturn]] void refuse(const at::Tensor& tensor) const {
    const auto& storage = *deferred_storage(tensor);
    const auto what = fmt::format("{} '{}'", storage.kind == DeferredStorage::Kind::Buffer ? "buffer" : "parameter", storage.name);
    if (storage.tape == nullptr) {
      throw UsageError(
          "{} needs the values of {}, which has none, because nobody has loaded or initialised it. load_weights, checkpoint::load and "
          "load_full_state_dict load it, and ShardOptions::param_init_fn initialises it",
          op_.name(), what);
    }
    throw UsageError(
        "{} needs the values of {}, which has none yet, because it was made inside deferred_init; first call fully_shard, or "
        "materialize(module) for a module that is not sharded",
        op_.name(), what);
  }

  /// Returns the tape on which to record: that of the tensor that the operator changes, else `otherwise`.
  static std::shared_ptr<Tape> tape_for(const Seen& seen, const std::shared_ptr<Tape>& otherwise) {
    return seen.written.defined() ? deferred_storage(seen.written)->tape : otherwise;
  }

  void run_inside(const Seen& seen, const std::shared_ptr<Tape>& tape) {
    if (op_.from_libtorch && op_.is_composite(below_) && (op_.implicit_autograd || op_.device)) {
      fill_in_device(seen);
      handle_.redispatchBoxed(below_, &stack_);  // record() is called for each operator that it calls
      return;
    }
    const bool makes = !seen.anything && op_.device && !from_data();
    if (seen.deferred.empty() && !makes) return run_for_values(seen);
    const bool draws = op_.random || op_.generator;
    if (op_.needs_values || seen.writes_values || (draws && !op_.generator)) return run_for_values(seen);
    if (!run_on_meta(seen, tape, draws)) run_for_values(seen);
  }

  /// torch::tensor({1, 2}) makes a tensor on the host and writes its values through a pointer. Only this call excludes the dispatch key of
  /// autograd, but not ADInplaceOrView.
  bool from_data() const {
    using c10::impl::tls_is_dispatch_key_excluded;
    const auto& device = stack_[base_ + *op_.device];
    return (device.isNone() || device.toDevice().is_cpu()) && tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
           !tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
  }

  c10::Device device_for(const Seen& seen) const {
    if (op_.device) {
      const auto& given = stack_[base_ + *op_.device];
      if (!given.isNone() && !given.toDevice().is_meta()) return given.toDevice();
    }
    return seen.deferred.empty() ? c10::Device(c10::kCPU) : deferred_storage(seen.deferred.front())->device_of_values;
  }

  /// Fills in the device, because operators such as empty_like would ask the deferred tensor for its device, and get the meta device.
  void fill_in_device(const Seen& seen) {
    if (!op_.device || seen.deferred.empty()) return;
    auto& device = stack_[base_ + *op_.device];
    if (device.isNone() || device.toDevice().is_meta()) device = device_for(seen);
  }

  /// Runs the operator on the meta device and records it. Returns false if the operator gives no result on that device.
  bool run_on_meta(const Seen& seen, const std::shared_ptr<Tape>& tape, bool draws) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kPagingKey);
    const auto device = device_for(seen);
    const Stack given(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
    TapeRecord record{.handle = handle_, .arguments = given};
    std::vector<DeferredStorage*> written;
    for_each([&](size_t argument, size_t element, const at::Tensor& tensor) {
      auto* const storage = deferred_storage(tensor);
      if (storage != nullptr && storage->tape == tape) {
        record.operands.push_back(operand(tensor, *storage, argument, element));
        put_operand(record.arguments[argument], element, at::Tensor());
        if (op_.writes[argument]) written.push_back(storage);
      } else {
        const c10::AutoGradMode no_grad(false);
        const auto values = storage != nullptr ? computed_values(tensor) : tensor.detach().clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) values.unsafeGetTensorImpl()->set_wrapped_number(true);
        put_operand(record.arguments[argument], element, values);
        put_operand(stack_[base_ + argument], element, like_on_meta(tensor));
      }
    });
    if (op_.device) {
      record.arguments[*op_.device] = device;
      stack_[base_ + *op_.device] = c10::Device(c10::kMeta);
    }
    try {
      const Unguarded operands(seen.deferred);
      handle_.callBoxed(&stack_);
    } catch (const c10::NotImplementedError&) {
      stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
      stack_.insert(stack_.end(), given.begin(), given.end());
      return false;
    }
    if (draws) record.draw = drawn(given, *tape, device);
    for_each_operand(stack_, base_, [&](size_t result, size_t element, const at::Tensor& tensor) {
      if (deferred_storage(tensor) != nullptr) return;
      const auto storage = c10::make_intrusive<DeferredStorage>(*tensor.storage().unsafeGetStorageImpl(), tape, device);
      storage->number = tape->new_number();
      put_into(tensor, storage);
      record.written.push_back(storage->number);
      record.results.push_back(operand(tensor, *storage, result, element));
    });
    if (!seen.anything && op_.name().starts_with("aten::empty")) return true;  // needs no record, because any values will do
    std::optional<size_t> replaced;
    if (op_.replaces && record.operands.front().is_all()) {
      replaced = std::exchange(written.front()->number, tape->new_number());
      record.operands.front().number = written.front()->number;
    }
    for (const auto* storage : written) record.written.push_back(storage->number);
    tape->append(std::move(record));
    if (replaced) tape->close(*replaced);
    return true;
  }

  static TapeTensor operand(const at::Tensor& tensor, const DeferredStorage& storage, size_t argument, size_t element) {
    auto result = on_tape(tensor, storage);
    result.argument = argument;
    result.element = element;
    return result;
  }

  static at::Tensor like_on_meta(const at::Tensor& tensor) {
    auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }

  /// Draws the random numbers once and drops them, so that the generator has the state that it would have without deferred_init.
  TapeDraw drawn(Stack arguments, const Tape& tape, c10::Device device) const {
    TapeDraw draw{.argument = *op_.generator};
    const auto& given = arguments[*op_.generator];
    if (given.isNone() && tape.is_seeded()) return draw;
    auto generator = given.isNone() ? at::globalContext().defaultGenerator(device) : given.toGenerator();
    {
      const std::lock_guard lock(generator.mutex());
      draw.state = generator.get_state();
    }
    const c10::AutoGradMode no_grad(false);
    put_values(arguments, 0, /*only_read=*/true);
    if (op_.device) arguments[*op_.device] = device;
    handle_.callBoxed(&arguments);
    return draw;
  }

  /// Replaces deferred tensors by tensors with values. With `only_read`, tensors that the operator overwrites may have any values.
  void put_values(Stack& stack, size_t base, bool only_read) const {
    std::vector<std::tuple<size_t, size_t, at::Tensor>> deferred;
    for_each_operand(stack, base, [&](size_t argument, size_t element, const at::Tensor& tensor) {
      if (argument < op_.arguments && deferred_storage(tensor) != nullptr) deferred.emplace_back(argument, element, tensor);
    });
    for (const auto& [argument, element, tensor] : deferred) {
      const auto options = tensor.options().device(deferred_storage(tensor)->device_of_values);
      const bool any = only_read && op_.writes[argument];
      put_operand(stack[base + argument], element,
                  any ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : computed_values(tensor));
    }
  }

  /// Runs the operator on values that are computed for it. Its results are not deferred.
  void run_for_values(const Seen& seen) {
    if (const auto& tape = Recording::tape(); op_.generator && tape->is_seeded() && stack_[base_ + *op_.generator].isNone()) {
      auto generator = at::globalContext().defaultGenerator(device_for(seen)).clone();
      generator.set_current_seed(tape->next_key());
      stack_[base_ + *op_.generator] = generator;
    }
    if (seen.deferred.empty()) {
      const c10::impl::ExcludeDispatchKeyGuard excluded(kPagingKey);
      handle_.redispatchBoxed(below_, &stack_);
      return;
    }
    const Stack given(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
    put_values(stack_, base_, /*only_read=*/false);
    if (op_.device) stack_[base_ + *op_.device] = device_for(seen);
    const Stack used(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
    {
      const c10::impl::ExcludeDispatchKeyGuard excluded(kPagingKey);
      handle_.callBoxed(&stack_);
    }
    // Copies written values back to the deferred tensors, which also replace results that are written operands.
    for_each_operand(given, 0, [&](size_t argument, size_t element, const at::Tensor& tensor) {
      if (!op_.writes[argument] || deferred_storage(tensor) == nullptr) return;
      const auto now = used[argument].isTensor() ? used[argument].toTensor() : used[argument].toListRef()[element].toTensor();
      for (size_t i = base_; i < stack_.size(); i++) {
        if (stack_[i].isTensor() && stack_[i].toTensor().is_same(now)) stack_[i] = tensor;
      }
      const c10::AutoGradMode no_grad(false);
      at::Tensor(tensor).copy_(now);  // this copy is recorded
    });
  }

  const c10::OperatorHandle& handle_;
  const OperatorFacts& op_;
  const c10::DispatchKeySet below_;
  Stack& stack_;
  const size_t base_;
};

}  // namespace

Recording::Recording(std::shared_ptr<Tape> tape) : before_(std::exchange(tape_of_thread, std::move(tape))) {
  detail::deferring++;
}

Recording::~Recording() {
  tape_of_thread = std::move(before_);
  detail::deferring--;
}

const std::shared_ptr<Tape>& Recording::tape() {
  return tape_of_thread;
}

bool record(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  return Recorder(handle, op, below, stack).run();
}

}  // namespace tessera
