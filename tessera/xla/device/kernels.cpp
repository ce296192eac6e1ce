#include "tessera/xla/device/kernels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/unread.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

std::vector<c10::FunctionSchema>& schemas() {
  static auto& all = *new std::vector<c10::FunctionSchema>;
  return all;
}

/// The boxed kernel of an operator in a table: calls the operator's lowering, or runs the operator on the CPU if the lowering throws NotLowered.
class Lowered final : public c10::OperatorKernel {
 public:
  Lowered(Lowering lower, const c10::FunctionSchema& schema) : lower_(std::move(lower)), signature_(schema) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    const auto lock = lock_device();
    runner().note_operator();
    const at::AutoDispatchBelowADInplaceOrView below;
    Call call(signature_, *stack);
    try {
      if (call.is_foreign()) throw NotLowered();
      lower_(call);
    } catch (const NotLowered&) {
      call.undo();
      run_on_host(op, stack);
    }
  }

 private:
  Lowering lower_;
  Signature signature_;
};

using Operators = std::map<std::string, std::vector<c10::OperatorHandle>>;

/// ATen's operators by name, without the overload and without the underscore of in-place operators.
const Operators& operators() {
  static const auto& all = *[] {
    auto* const found = new Operators;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (!name.name.starts_with("aten::")) continue;
      auto plain = name.name.substr(6);
      if (plain.ends_with('_')) plain.pop_back();
      if (const auto op = c10::Dispatcher::singleton().findSchema(name)) (*found)[plain].push_back(*op);
    }
    return found;
  }();
  return all;
}

/// Returns the types of all arguments except `out` arguments.
std::string argument_types(const c10::FunctionSchema& schema) {
  std::string types;
  for (const auto& argument : schema.arguments()) {
    if (!argument.is_out()) types += argument.type()->str() + ",";
  }
  return types;
}

bool needs_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  for (const auto key : {DispatchKey::CompositeImplicitAutograd, DispatchKey::CompositeExplicitAutograd,
                         DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return false;
  }
  return true;
}

/// Returns the operators for which add_kernels() registers a kernel with this name.
std::vector<c10::OperatorHandle> forms_of(const std::string& name) {
  auto plain = name.substr(0, name.find('.'));
  const auto overload = plain.size() == name.size() ? "" : name.substr(plain.size() + 1);
  const auto named = c10::Dispatcher::singleton().findSchema({"aten::" + plain, overload});
  if (!named) return {};  // this version of libtorch does not have the operator
  if (plain.ends_with('_')) plain.pop_back();
  std::vector<c10::OperatorHandle> forms;
  for (const auto& op : operators().at(plain)) {
    if (needs_kernel(op) && argument_types(op.schema()) == argument_types(named->schema())) forms.push_back(op);
  }
  if (forms.empty()) forms.push_back(*named);
  return forms;
}

}  // namespace

Signature::Signature(const c10::FunctionSchema& schema)
    : name(c10::toString(schema.operator_name())),
      arguments(schema.arguments().size()),
      inputs(arguments),
      returns(schema.returns().size()) {
  for (size_t i = 0; i < returns; i++) {
    const auto kind = schema.returns()[i].real_type()->kind();
    if (kind == c10::TypeKind::SymIntType || kind == c10::TypeKind::IntType) numbers.push_back(i);
  }
  while (inputs > 0 && schema.arguments()[inputs - 1].is_out()) inputs--;
  const auto written = [&](size_t i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite() ? alias : nullptr;
  };
  for (const auto& result : schema.returns()) {
    for (size_t i = 0; result.alias_info() && i < arguments; i++) {
      if (written(i) && *written(i) == *result.alias_info()) outs.push_back(i);
    }
  }
  for (size_t i = 0; returns == 0 && i < arguments; i++) {
    if (written(i)) outs.push_back(i);
  }
  for (size_t i = 0; i < arguments; i++) {
    const auto& argument = schema.arguments()[i];
    defaults.push_back(argument.default_value().value_or(c10::IValue()));
    if (argument.name() == "dtype") dtype = i;
    if (i < inputs && !written(i) && !may_be_unread(schema.name(), argument.name())) counted |= uint64_t{1} << i;
  }
}

Call::Call(const Signature& signature, torch::jit::Stack& stack)
    : signature_(signature), stack_(stack), arguments_(torch::jit::pop(stack, signature.arguments)) {
  for (const auto i : signature.outs) outs_.push_back(arguments_[i].toTensor());
}

bool Call::is_foreign() const {
  return std::ranges::any_of(
      arguments_, [](const c10::IValue& value) { return value.isTensor() && value.toTensor().defined() && value.toTensor().is_complex(); });
}

void Call::undo() {
  stack_.insert(stack_.end(), arguments_.begin(), arguments_.end());
}

Sizes Call::integers(size_t i) const {
  const auto& given = (*this)[i];
  if (given.isNone()) return {};
  if (given.isInt()) return {given.toInt()};
  return given.toIntVector();
}

Value Call::value(size_t i) const {
  if ((*this)[i].isScalar()) {
    const auto scalar = arguments_[i].toScalar();
    if (scalar.isFloatingPoint()) return hlo::scalar(scalar.toDouble(), at::kFloat);
    return hlo::constant(scalar.toLong(), scalar.isBoolean() ? at::kBool : at::kLong);
  }
  return read(tensor(i));
}

Value Call::value(size_t i, at::ScalarType element) const {
  const auto number = [&](const at::Scalar& scalar) {
    return c10::isIntegralType(element, false) && scalar.isIntegral(false) ? hlo::constant(scalar.toLong(), element)
                                                                           : hlo::scalar(scalar.toDouble(), element);
  };
  if ((*this)[i].isScalar()) return number(arguments_[i].toScalar());
  // libtorch wraps the numbers of some operators in CPU tensors. Converting them here makes even whole numbers arguments of the program.
  const auto& given = tensor(i);
  if (given.is_cpu() && given.numel() == 1 && given.scalar_type() != at::kBool && c10::isFloatingType(element)) {
    return reshape(number(given.item()), given.sizes());
  }
  return convert(read(given), element);
}

Value Call::wide_value(size_t i) const {
  return value(i, hlo::wide(result_type()));
}

at::ScalarType Call::result_type(size_t i) const {
  if (const auto* const tensor = out(i)) {
    if (signature_.dtype) read_ |= uint64_t{1} << *signature_.dtype;
    return tensor->scalar_type();
  }
  for (const auto& argument : arguments_) {
    if (argument.isTensor() && argument.toTensor().defined()) return argument.toTensor().scalar_type();
  }
  return at::kFloat;
}

void Call::give(std::span<const Value> results) {
  for (auto unread = signature_.counted & ~read_; unread != 0; unread &= unread - 1) {
    if (is_given(static_cast<size_t>(std::countr_zero(unread)))) throw NotLowered();
  }
  for (size_t i = 0; i < std::max(results.size(), signature_.returns); i++) {
    if (std::ranges::find(signature_.numbers, i) != signature_.numbers.end()) {
      stack_.emplace_back(int64_t{0});
      continue;
    }
    const auto* const given = out(i);
    at::Tensor result;
    if (i < results.size() && results[i]) {
      result = given ? *given : new_tensor(results[i]);
      if (given) {
        if (given->sizes() != results[i].sizes()) {
          if (signature_.outs[i] < signature_.inputs) {
            throw UsageError(
                "{} has a result of sizes {}, which a tensor of sizes {} can't take in place: use the form that returns a new tensor",
                signature_.name, c10::str(at::IntArrayRef(results[i].sizes())), c10::str(given->sizes()));
          }
          given->resize_(results[i].sizes());
        }
        write(*given, results[i]);
      }
    }
    if (i < signature_.returns) stack_.emplace_back(std::move(result));
  }
}

void Call::give_as(at::ScalarType type, std::vector<Value> results) {
  for (auto& result : results) {
    if (result) result = convert(result, type);
  }
  give(results);
}

torch::Library& library_of(const char* operators, c10::DispatchKey key) {
  static auto& all = *new std::deque<torch::Library>;  // never destroyed
  return all.emplace_back(torch::Library::IMPL, operators, key, __FILE__, __LINE__);
}

void add_kernels(std::span<const Kernel> kernels) {
  auto& aten = library_of("aten", c10::DispatchKey::PrivateUse1);
  for (const auto& kernel : kernels) {
    for (const auto& name : words_in(kernel.names)) {
      for (const auto& form : forms_of(name)) {
        const auto full = c10::toString(form.operator_name()).substr(6);
        aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Lowered>(kernel.lower, form.schema())));
        schemas().push_back(form.schema());
      }
    }
  }
}

std::span<const c10::FunctionSchema> lowered_schemas() {
  return schemas();
}

void register_kernels() {
  register_fallback();
  register_plumbing();
  register_elementwise();
  register_activations();
  register_reductions();
  register_losses();
  register_norms();
  register_products();
  register_attention();
  register_convolutions();
  register_pooling();
  register_resampling();
  register_recurrent();
  register_random();
  register_indexing();
  register_ordering();
  register_makers();
  register_ctc_loss();
  register_bags();
  register_compositions();
  register_autocast();
}

}  // namespace tessera::xla
