#include "tessera/data/send_samples.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

using nlohmann::json;

json shape_of(const at::Tensor& rows) {
  if (!rows.defined()) return {};
  return {{"dtype", static_cast<int>(rows.scalar_type())}, {"sizes", rows.sizes().vec()}};
}

at::Tensor sent(const Communicator& world, const at::Tensor& rows, const json& shape, int64_t first, int64_t count) {
  if (shape.is_null()) return {};
  const auto device = world.traits().device;
  const auto whole = world.is_first()
                         ? rows.to(device).contiguous()
                         : at::empty(shape.at("sizes").get<std::vector<int64_t>>(),
                                     at::TensorOptions(device).dtype(static_cast<at::ScalarType>(shape.at("dtype").get<int>())));
  world.broadcast(whole, /*root=*/0, {.unit = "dispatch"}).wait();
  return whole.narrow(0, first, count).clone();
}

}  // namespace

void expect_rows_of(const std::vector<Share>& shares, const Samples& batch) {
  int64_t rows = 0;
  for (const auto& share : shares) rows += share.rows;
  for (const auto& tensor : {batch.inputs, batch.targets}) {
    if (!tensor.defined() || (tensor.dim() > 0 && tensor.size(0) == rows)) continue;
    throw UsageError("a batch that rank 0 dispatches must have a row for each of its {} samples, but there is a tensor of sizes {}", rows,
                     c10::str(tensor.sizes()));
  }
}

std::optional<Samples> send_samples(const Communicator& world, const std::optional<Samples>& batch, const std::vector<Share>& shares) {
  json header;
  if (batch) {
    header = {{"inputs", shape_of(batch->inputs)}, {"targets", shape_of(batch->targets)}};
    for (const auto& share : shares) header["shares"].push_back({share.rows, share.repeats, share.weight});
  }
  const auto sent_header = json::parse(world.texts(header.dump(), {.unit = "dispatch"}).front());
  if (sent_header.is_null()) return std::nullopt;
  const auto& all = sent_header.at("shares");
  int64_t first = 0;
  for (int rank = 0; rank < world.rank(); rank++) first += all.at(static_cast<size_t>(rank)).at(0).get<int64_t>();
  const auto& own = all.at(static_cast<size_t>(world.rank()));
  const auto count = own.at(0).get<int64_t>();
  return Samples{.inputs = sent(world, batch ? batch->inputs : at::Tensor(), sent_header.at("inputs"), first, count),
                 .targets = sent(world, batch ? batch->targets : at::Tensor(), sent_header.at("targets"), first, count),
                 .repeats = own.at(1).get<int64_t>(),
                 .weight = own.at(2).get<double>()};
}

}  // namespace tessera::data
