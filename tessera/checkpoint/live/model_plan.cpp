#include "tessera/checkpoint/live/model_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/convert/pieces.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/weight_forms.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kComparedAtOnce = 1 << 20;  // values

/// Whether a load accepts values of one dtype for a tensor of the other: the same dtype, or real numbers for a floating-point dtype.
bool converts(at::ScalarType from, at::ScalarType to) {
  return from == to || (at::isFloatingType(to) && !at::isComplexType(from));
}

/// The values in the files of a checkpoint.
class StoredValues : public ValueSource {
 public:
  explicit StoredValues(const CatalogReader& reader) : reader_(reader) {}
  const Catalog& catalog() const override { return reader_.catalog(); }
  void expect_parts(const std::string& name, std::span<const PartRecord> /*parts*/) const override { reader_.expect_complete(name); }
  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> parts) const override {
    const auto &first = reader_.info(one), &second = reader_.info(other);
    if (first.dtype != second.dtype || first.shape != second.shape) return false;
    const auto differs = [&](const TensorSlice& piece) {
      const auto values = at::empty(piece.sizes, at::TensorOptions(at::kCPU).dtype(first.dtype)), others = at::empty_like(values);
      reader_.read(one, piece, values);
      reader_.read(other, piece, others);
      return std::memcmp(values.const_data_ptr(), others.const_data_ptr(), values.nbytes()) != 0;
    };
    bool same = true;
    for (const auto& part : parts) {
      for (const auto& slice : part.slices)
        for_each_piece(slice, kComparedAtOnce, [&](const TensorSlice& piece) { same = same && !differs(piece); });
    }
    return same;
  }
  void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int rank) const override {
    read_part(reader_, name, part, values, rank);
  }

 private:
  const CatalogReader& reader_;
};

/// Whether a stored tensor has the plain values of a weight that the model holds in another form, such as a quantized one.
bool has_weight(const StoredTensor& stored, const HeldForm* form) {
  return form != nullptr && stored.shape == form->sizes && converts(stored.dtype, form->dtype) && stored.dtype != at::kByte;
}

/// Removes the names that match the patterns from a container, and returns them.
std::vector<std::string> taken_out(auto& names, const std::vector<std::string>& patterns) {
  std::vector<std::string> taken;
  std::erase_if(names, [&](const std::string& name) {
    if (!matches(name, patterns)) return false;
    taken.push_back(name);
    return true;
  });
  return taken;
}

}  // namespace

ModelNames names_of(const LocalValues& model, const std::vector<std::string>& may_be_missing) {
  ModelNames names;
  std::map<std::string, std::vector<std::string>> parameters;
  for (const auto& part : model.parts) parameters[part.name] = {part.name};
  for (const auto& [name, tensor] : model.outside) parameters[name] = {name};
  for (const auto& [alias, first] : model.aliases) parameters[first].push_back(alias);
  for (auto& [first, all] : parameters) {
    names.all.insert(all.begin(), all.end());
    if (!matches(first, may_be_missing)) names.parameters.push_back(std::move(all));
  }
  for (const auto& [name, tensor] : model.buffers) names.all.insert(name);
  return names;
}

bool matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    try {
      return std::regex_match(name, std::regex(pattern));
    } catch (const std::regex_error& error) {
      throw UsageError("'{}' in the options is not a regular expression: {}", pattern, error.what());
    }
  });
}

std::unique_ptr<ValueSource> source_of(const CatalogReader& reader) {
  return std::make_unique<StoredValues>(reader);
}

ModelPlan::ModelPlan(const torch::nn::Module& model, const Communicator& world, Subject subject, std::string what,
                     c10::function_ref<void()> first)
    : model_(model), world_(world), subject_(subject), what_(std::move(what)) {
  together([&] {
    first();
    adapters().expect_unmerged(model_);
    values_ = local_values(model_);
  });
  elsewhere_ = names_elsewhere(values_, world_);
}

void ModelPlan::together(c10::function_ref<void()> act) const {
  all_or_none(world_, subject_, fmt::format("can't load {}; nothing was changed", what_), act);
}

void ModelPlan::expect_finished(const AllOrNone& step) const {
  step.expect_all(world_, subject_, fmt::format("could not finish loading {}; only a part of it is loaded", what_));
}

void ModelPlan::fit(std::unique_ptr<ValueSource> stored, const LoadOptions& options, const std::string& where,
                    const std::set<std::string>& in_base, c10::function_ref<bool(const std::string& name)> of_model) {
  stored_ = std::move(stored);
  first_of_tied_ = options.first_of_tied;
  for (const auto& [name, tensor] : stored_->catalog().tensors) {
    if (of_model(name) && !elsewhere_.contains(name)) unused_.insert(name);
  }
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& [alias, first] : values_.aliases) aliases[first].push_back(alias);
  // Calls `visit` with each tensor of the model and the parts of it that this process has.
  const auto for_each = [&](auto&& visit) {
    for (const auto& part : values_.parts) visit(part.name, part.values, records_of(part));
    for (const auto* tensors : {&values_.outside, &values_.buffers}) {
      for (const auto& [name, tensor] : *tensors) visit(name, tensor, std::vector{whole_record(tensor.sizes())});
    }
  };
  for_each([&](const std::string& name, const at::Tensor& here, const std::vector<PartRecord>& parts) {
    find(name, aliases[name], here, parts);
  });
  std::erase_if(missing_, [&](const std::string& name) { return in_base.contains(name); });
  const auto missing = taken_out(missing_, options.may_be_missing);
  const auto unused = taken_out(unused_, options.may_be_unknown);
  if (!missing.empty()) log(LogLevel::Info, "{} has no {}, which keep their values", where, joined(missing));
  if (!unused.empty()) log(LogLevel::Info, "the model has no {}, which are not loaded from {}", joined(unused), where);
  std::vector<std::string> faults;
  if (!missing_.empty()) faults.push_back("it has no " + some_of(missing_));
  if (!unused_.empty()) faults.push_back("the model has no " + some_of({unused_.begin(), unused_.end()}));
  faults.insert(faults.end(), misfits_.begin(), misfits_.begin() + std::min<std::ptrdiff_t>(std::ssize(misfits_), 5));
  if (misfits_.size() > 5) faults.push_back(fmt::format("and {} more do not fit", misfits_.size() - 5));
  if (!faults.empty()) {
    const bool names_differ = !missing_.empty() || !unused_.empty();
    throw UsageError("{} is of another model: {}; make the model as it was saved, or choose another checkpoint{}", where,
                     joined(faults, "; "),
                     names_differ ? "; a program can allow other names by may_be_missing and may_be_unknown of the options" : "");
  }
  for_each([&](const std::string& name, const at::Tensor&, const std::vector<PartRecord>& parts) {
    const auto found = found_.find(name);
    if (found == found_.end()) return;
    const auto* const form = form_of(name);
    const bool is_encoded = has_weight(stored_->catalog().tensors.at(found->second), form);  // the whole weight is read and encoded
    stored_->expect_parts(found->second, is_encoded ? std::vector{whole_record(form->sizes)} : parts);
  });
  expect_writable(values_.units);
}

const HeldForm* ModelPlan::form_of(const std::string& name) const {
  const auto found = values_.forms.find(name);
  return found == values_.forms.end() ? nullptr : found->second;
}

void ModelPlan::find(const std::string& name, const std::vector<std::string>& other_names, const at::Tensor& here,
                     const std::vector<PartRecord>& parts) {
  const auto* const form = form_of(name);
  auto candidates = other_names;
  candidates.insert(candidates.begin(), name);
  // A tied parameter may be stored once, under any of its names.
  for (const auto& candidate : std::vector(candidates)) {
    const auto& aliases = stored_->catalog().aliases;
    if (const auto first = aliases.find(candidate); first != aliases.end()) candidates.push_back(first->second);
  }
  for (const auto& candidate : candidates) {
    const auto stored = stored_->catalog().tensors.find(candidate);
    if (stored == stored_->catalog().tensors.end()) continue;
    unused_.erase(candidate);
    if (const auto [found, is_first] = found_.try_emplace(name, candidate); !is_first) {
      if (found->second != candidate && !first_of_tied_ && !stored_->is_same(found->second, candidate, parts)) {
        misfits_.push_back(
            fmt::format("'{0}' and '{1}' are one parameter in the model, but differ there (first_of_tied in the options takes '{0}')",
                        found->second, candidate));
      }
      continue;
    }
    const auto& there = stored->second;
    const auto dtype = original_dtype(here);
    const auto& shape = parts.front().shape;
    if (has_weight(there, form) || (there.shape == shape && converts(there.dtype, dtype))) continue;
    const auto held = form == nullptr ? ""
                                      : fmt::format(", which holds {} of [{}] as {}", c10::toString(form->dtype),
                                                    fmt::join(form->sizes, ", "), form->name);
    misfits_.push_back(fmt::format("'{}' is {} of [{}] there, but {} of [{}] in the model{}", candidate, c10::toString(there.dtype),
                                   fmt::join(there.shape, ", "), c10::toString(dtype), fmt::join(shape, ", "), held));
  }
  if (!found_.contains(name)) missing_.push_back(name);
}

void ModelPlan::load() {
  const auto units = values_.units;
  const WriteGuard guard(units, WriteKind::Load);
  values_ = local_values(model_);  // read again, because the guard may have moved shards into other memory
  for (const auto& part : values_.parts) fill(part.name, part.values, records_of(part), &part);
  for (const auto* tensors : {&values_.outside, &values_.buffers}) {
    for (const auto& [name, tensor] : *tensors) fill(name, tensor, whole_records(tensor.sizes(), world_), nullptr);
  }
  trust_start(values_, [&](const LocalPart& part) { return found_.contains(part.name); });
}

at::Tensor ModelPlan::read_held(const std::string& stored, const HeldForm& form) const {
  const auto values = at::empty(form.sizes, at::TensorOptions(at::kCPU).dtype(form.dtype));
  stored_->read(stored, whole_record(form.sizes), values.view({-1}), world_.local_ranks().front());
  try {
    return form.encode(values).view({-1});
  } catch (const UsageError& error) {
    throw UsageError("'{}': {}", stored, error.what());
  }
}

void ModelPlan::fill(const std::string& name, const at::Tensor& to, const std::vector<PartRecord>& records, const LocalPart* part) const {
  const auto found = found_.find(name);
  if (found == found_.end()) return;
  if (part == nullptr) allocate_if_meta(to, world_.traits().device);
  stored_->open(found->second);
  const auto* const form = form_of(name);
  const auto read = [&](const PartRecord& record, const at::Tensor& flat, int rank) { stored_->read(found->second, record, flat, rank); };
  if (has_weight(stored_->catalog().tensors.at(found->second), form)) {
    auto own = read_held(found->second, *form);
    if (part != nullptr) {
      std::vector<at::Tensor> values;
      for (const auto& range : part->ranges) values.push_back(own.narrow(0, range.begin, range.numel));
      own = tensor_of_ranks(std::move(values), to, records, world_);
    }
    to.view({-1}).narrow(0, 0, own.numel()).copy_(own);
  } else if (part != nullptr && to.is_cpu() && records.size() == 1) {  // reads into the shard, without a copy
    read(records.front(), to.narrow(0, 0, records.front().numel()), world_.local_ranks().front());
  } else {
    at::Tensor(to).copy_(read_for_ranks(to, records, to.scalar_type(), world_, read));
  }
  if (part != nullptr) part->note_values();
}

size_t first_file(const CatalogReader& stored, int rank) {
  return static_cast<size_t>(rank) % std::max<size_t>(stored.catalog().files.size(), 1);
}

void verify_share(const CatalogReader& stored, const Communicator& world, std::span<const int> ranks) {
  const auto& checksums = stored.catalog().checksums;
  const bool by_file = stored.catalog().files.size() >= ranks.size();
  for (size_t i = 0; i < checksums.size(); i++) {
    const int rank = ranks[(by_file ? checksums[i].file : i) % ranks.size()];
    if (std::ranges::find(world.local_ranks(), rank) != world.local_ranks().end()) stored.verify(checksums[i]);
  }
}

void read_part(const CatalogReader& stored, const std::string& name, const PartRecord& part, const at::Tensor& values, int rank) {
  const auto views = views_of_slices(values, part.slices, part.strides);
  for (size_t i = 0; i < views.size(); i++) stored.read(name, part.slices[i], views[i], first_file(stored, rank));
}

}  // namespace tessera::checkpoint
