#include "tessera/xla/graph/step_program.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <unordered_map>

#include "tessera/xla/graph/ops.h"
#include "tessera/xla/pjrt/element_types.h"

namespace tessera::xla {
namespace {

std::atomic<uint64_t> visits = 0;

/// Returns the type in which the program takes a number of type `element` as an argument. letter_of() begins the names of such arguments.
at::ScalarType argument_type(at::ScalarType element) {
  return element == at::kDouble ? at::kDouble : c10::isIntegralType(element, false) ? at::kLong : at::kFloat;
}
char letter_of(at::ScalarType argument) {
  return argument == at::kDouble ? 'd' : argument == at::kLong ? 'n' : 's';
}

std::string name_of(const Value& value) {
  const auto& node = value.node();
  switch (node.kind) {
    case Node::Kind::Data:
      return fmt::format("%a{}", node.place);
    case Node::Kind::Scalar:
      return fmt::format("%{}{}", letter_of(node.results[0].element), node.place);
    case Node::Kind::Operation:
      break;
  }
  return node.results.size() > 1 ? fmt::format("%v{}#{}", node.place, value.result()) : fmt::format("%v{}", node.place);
}

/// Prints the region of an operation, such as a reduction, that combines two elements.
std::string region_of(const char* operation, const std::string& element) {
  const auto scalar = fmt::format("tensor<{}>", element);
  return fmt::format(R"( ({{
      ^bb0(%ra: {0}, %rb: {0}):
        %rc = "stablehlo.{1}"(%ra, %rb) : ({0}, {0}) -> {0}
        "stablehlo.return"(%rc) : ({0}) -> ()
    }}))",
                     scalar, operation);
}

/// Prints the region of a sort. Floating-point numbers need TOTALORDER: positive NaN is the largest in it.
std::string comparison(const char* direction, at::ScalarType type) {
  const auto* const order = c10::isFloatingType(type) ? "TOTALORDER" : hlo::comparison_type(type);
  return fmt::format(R"( ({{
      ^bb0(%ra: tensor<{0}>, %rb: tensor<{0}>, %rd: tensor<i64>, %re: tensor<i64>):
        %rc = "stablehlo.compare"(%ra, %rb) <{{comparison_direction = #stablehlo<comparison_direction {1}>, compare_type = #stablehlo<comparison_type {2}>}}> : (tensor<{0}>, tensor<{0}>) -> tensor<i1>
        "stablehlo.return"(%rc) : (tensor<i1>) -> ()
    }}))",
                     pjrt::element_name(type), direction, order);
}

std::string regions_of(const Node& node) {
  const std::string element(pjrt::element_name(node.results[0].element));
  if (std::string_view(node.name).starts_with("sort")) {
    return comparison(node.name == std::string_view("sort") ? "LT" : "GT", node.results[0].element);
  }
  static constexpr const char* kCombined[] = {"", "add", "multiply", "maximum", "minimum", "and", "or"};
  if (node.combine == Combine::None) return {};
  if (node.combine != Combine::Second) return region_of(kCombined[static_cast<size_t>(node.combine)], element);
  return fmt::format(
      " ({{\n      ^bb0(%ra: tensor<{0}>, %rb: tensor<{0}>):\n        \"stablehlo.return\"(%rb) : (tensor<{0}>) -> ()\n    }})", element);
}

/// Prints each item with `print`, and joins the texts by commas.
template <class List, class Print>
std::string with_commas(const List& items, const Print& print) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + print(item);
  return text;
}

/// Prints an operation whose numbers are arguments: a constant or a slice.
void print_moved(std::string& text, const Node& node) {
  const auto& type = node.results[0];
  if (node.operands.empty()) {
    const auto argument = argument_type(type.element);
    text += fmt::format("    %v{} = \"stablehlo.convert\"(%{}{}) : (tensor<{}>) -> {}\n", node.place, letter_of(argument),
                        node.first_argument, pjrt::element_name(argument), text_of(type));
    return;
  }
  std::string starts, types;
  for (size_t i = 0; i < node.numbers.size(); i++) {
    starts += fmt::format(", %n{}", static_cast<size_t>(node.first_argument) + i);
    types += ", tensor<i64>";
  }
  text +=
      fmt::format("    %v{} = \"stablehlo.dynamic_slice\"({}{}) <{{slice_sizes = array<i64: {}>}}> : ({}{}) -> {}\n", node.place,
                  name_of(node.operands[0]), starts, fmt::join(type.sizes, ", "), text_of(node.operands[0].type()), types, text_of(type));
}

void print_operation(std::string& text, const Node& node) {
  if (node.first_argument >= 0) return print_moved(text, node);
  const auto type = [](const auto& of) { return text_of(of); };
  const std::string_view name = std::string_view(node.name).starts_with("sort") ? "sort" : node.name;
  text += fmt::format("    %v{}", node.place);
  if (node.results.size() > 1) text += fmt::format(":{}", node.results.size());
  const auto* const dialect = name.find('.') == std::string_view::npos ? "stablehlo." : "";  // "chlo.erf" has its dialect in its name
  text += fmt::format(" = \"{}{}\"({})", dialect, name, with_commas(node.operands, name_of));
  if (!node.attributes.empty()) text += fmt::format(" <{{{}}}>", node.attributes);
  const auto results = with_commas(node.results, type);
  text += fmt::format("{} : ({}) -> {}\n", regions_of(node),
                      with_commas(node.operands, [](const Value& value) { return text_of(value.type()); }),
                      node.results.size() == 1 ? results : "(" + results + ")");
}

class KeyWriter {
 public:
  explicit KeyWriter(std::string& key) : key_(key) {}
  void add(uint64_t number) { key_.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(const std::string& text) {
    add(text.size());
    key_ += text;
  }
  void add(const Type& type) {
    add(static_cast<uint64_t>(type.element) << 32 | type.sizes.size());
    for (const auto size : type.sizes) add(static_cast<uint64_t>(size));
  }
  void add(const Value& value) {
    const auto& node = value.node();
    const auto element = node.kind == Node::Kind::Scalar ? static_cast<uint64_t>(node.results[0].element) : 0;
    add(static_cast<uint64_t>(node.kind) << 56 | element << 48 | static_cast<uint64_t>(value.result()) << 32 |
        static_cast<uint32_t>(node.place));
  }

 private:
  std::string& key_;
};

}  // namespace

StepProgram::StepProgram(std::vector<Wanted> wanted) : wanted_(std::move(wanted)) {
  const auto visit = ++visits;
  std::vector<Node*> next;
  for (const auto& result : wanted_) next.push_back(&result.value.node());
  while (!next.empty()) {
    auto* const node = next.back();
    next.pop_back();
    if (node->visited == visit) continue;
    node->visited = visit;
    node->place = node->first_argument = -1;
    if (node->kind == Node::Kind::Operation) operations_.push_back(node);
    for (const auto& operand : node->operands) next.push_back(&operand.node());
  }
  std::ranges::sort(operations_, {}, &Node::id);
  write_key();
}

void StepProgram::place(Node& leaf) {
  if (leaf.place >= 0) return;
  if (leaf.kind == Node::Kind::Data) {
    leaf.place = static_cast<int32_t>(data_.size());
    data_.push_back(&leaf);
    return;
  }
  auto& list = scalars_of(leaf.results[0].element).all;
  leaf.place = static_cast<int32_t>(list.size());
  list.push_back({&leaf, 0});
}

StepProgram::Scalars& StepProgram::scalars_of(at::ScalarType element) {
  return *std::ranges::find(scalars_, argument_type(element), &Scalars::element);
}

void StepProgram::move(const std::vector<bool>& marked) {
  auto mark = marked.begin();
  for (auto* const node : operations_) {
    const auto end = mark + static_cast<ptrdiff_t>(node->numbers.size());
    if (std::find(std::exchange(mark, end), end, true) == end) continue;
    // Offsets of a slice are integers, whatever its elements are.
    auto& list = node->operands.empty() ? scalars_of(node->results[0].element).all : scalars_of(at::kLong).all;
    node->first_argument = static_cast<int32_t>(list.size());
    for (size_t i = 0; i < node->numbers.size(); i++) list.push_back({node, i});
  }
}

/// Numbers leaves by their first use, so that the key does not depend on when a leaf was made, such as when a batch was uploaded.
void StepProgram::write_key() {
  KeyWriter key(key_);
  int32_t place_of_operation = 0;
  for (auto* const node : operations_) {
    key.add(reinterpret_cast<uint64_t>(node->name));  // names are literals, so equal addresses mean equal names
    key.add(node->numbers.size() << 40 | static_cast<uint64_t>(node->combine) << 32 | node->operands.size());
    if (node->numbers.empty()) key.add(node->attributes);
    numbers_.insert(numbers_.end(), node->numbers.begin(), node->numbers.end());
    for (const auto& operand : node->operands) {
      if (operand.node().kind != Node::Kind::Operation) place(operand.node());
      key.add(operand);
    }
    for (const auto& type : node->results) key.add(type);
    node->place = place_of_operation++;
  }
  for (const auto& result : wanted_) {
    if (result.value.node().kind != Node::Kind::Operation) place(result.value.node());
    key.add(result.value);
  }
  choose_donors();
  for (size_t i = 0; i < data_.size(); i++) {
    key.add(data_[i]->results[0]);
    key.add(static_cast<uint64_t>(result_in_[i]));
  }
}

void StepProgram::choose_donors() {
  result_in_.assign(data_.size(), -1);
  std::unordered_map<const Data*, std::vector<size_t>> arguments;
  for (size_t i = 0; i < data_.size(); i++) arguments[data_[i]->data.get()].push_back(i);
  for (size_t result = 0; result < wanted_.size(); result++) {
    const auto& [value, donor] = wanted_[result];
    const auto found = donor ? arguments.find(donor.get()) : arguments.end();
    if (found == arguments.end()) continue;
    for (const auto i : found->second) {
      if (result_in_[i] >= 0 || data_[i]->results[0] != value.type()) continue;
      result_in_[i] = static_cast<int>(result);
      break;
    }
  }
}

std::vector<std::shared_ptr<const Data>> StepProgram::arguments_of(Memory memory) const {
  std::vector<std::shared_ptr<const Data>> all;
  for (size_t i = 0; i < data_.size(); i++) {
    if ((result_in_[i] >= 0) == (memory == Memory::Taken)) all.push_back(data_[i]->data);
  }
  return all;
}

std::vector<Type> StepProgram::results() const {
  std::vector<Type> types;
  for (const auto& result : wanted_) types.push_back(result.value.type());
  return types;
}

pjrt::Program StepProgram::program() const {
  pjrt::Program program;
  std::vector<std::string> parameters;
  for (size_t i = 0; i < data_.size(); i++) {
    const auto& type = data_[i]->results[0];
    program.parameters.push_back({type, result_in_[i] >= 0});
    parameters.push_back(fmt::format("%a{}: {}", i, text_of(type)));
    if (result_in_[i] >= 0) parameters.back() += fmt::format(" {{tf.aliasing_output = {} : i32}}", result_in_[i]);
  }
  std::string body;
  for (const auto& [element, numbers] : scalars_) {
    if (numbers.empty()) continue;
    const auto letter = letter_of(element);
    const Type all{element, {static_cast<int64_t>(numbers.size())}}, row{element, {1}}, one{element, {}};
    program.parameters.push_back({all});
    parameters.push_back(fmt::format("%{}: {}", letter, text_of(all)));
    for (size_t i = 0; i < numbers.size(); i++) {
      body += fmt::format(
          "    %{0}row{1} = \"stablehlo.slice\"(%{0}) <{{limit_indices = array<i64: {2}>, start_indices = array<i64: {1}>, strides = "
          "array<i64: 1>}}> : ({3}) -> {4}\n",
          letter, i, i + 1, text_of(all), text_of(row));
      body += fmt::format("    %{0}{1} = \"stablehlo.reshape\"(%{0}row{1}) : ({2}) -> {3}\n", letter, i, text_of(row), text_of(one));
    }
  }
  for (const auto* const node : operations_) print_operation(body, *node);
  const auto types = with_commas(wanted_, [](const Wanted& result) { return text_of(result.value.type()); });
  const auto names = with_commas(wanted_, [](const Wanted& result) { return name_of(result.value); });
  program.text = fmt::format("module @step {{\n  func.func public @main({}) -> ({}) {{\n{}    \"func.return\"({}) : ({}) -> ()\n  }}\n}}\n",
                             fmt::join(parameters, ", "), types, body, names, types);
  return program;
}

std::vector<std::vector<pjrt::Buffer>> StepProgram::arguments(const pjrt::Client& client, int replicas) const {
  std::vector<std::vector<pjrt::Buffer>> arguments(static_cast<size_t>(replicas));
  for (const auto* const node : data_) {
    const auto& of_replicas = *expect_values(node->data);
    for (size_t replica = 0; replica < arguments.size(); replica++) arguments[replica].push_back(of_replicas[replica]);
  }
  for (const auto& [element, all] : scalars_) {
    if (all.empty()) continue;
    auto numbers = at::empty({static_cast<int64_t>(all.size())}, element);
    for (size_t i = 0; i < all.size(); i++) {
      const auto& [node, which] = all[i];
      if (element == at::kLong) {
        numbers.mutable_data_ptr<int64_t>()[i] = node->numbers[which];
        continue;
      }
      const auto number = node->kind == Node::Kind::Scalar ? node->number : std::bit_cast<double>(node->numbers[which]);
      if (element == at::kDouble) {
        numbers.mutable_data_ptr<double>()[i] = number;
      } else {
        numbers.mutable_data_ptr<float>()[i] = static_cast<float>(number);
      }
    }
    for (int replica = 0; replica < replicas; replica++) arguments[static_cast<size_t>(replica)].push_back(client.upload(numbers, replica));
  }
  return arguments;
}

}  // namespace tessera::xla
