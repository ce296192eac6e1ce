#include "tessera/checkpoint/formats/dtype_names.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

struct Dtype {
  const char* name;
  at::ScalarType type;
};
using enum at::ScalarType;
constexpr std::array kDtypes = {Dtype{"F64", Double},
                                Dtype{"F32", Float},
                                Dtype{"F16", Half},
                                Dtype{"BF16", BFloat16},
                                Dtype{"I64", Long},
                                Dtype{"I32", Int},
                                Dtype{"I16", Short},
                                Dtype{"I8", Char},
                                Dtype{"U64", UInt64},
                                Dtype{"U32", UInt32},
                                Dtype{"U16", UInt16},
                                Dtype{"U8", Byte},
                                Dtype{"BOOL", Bool},
                                Dtype{"C64", ComplexFloat},
                                Dtype{"F8_E5M2", Float8_e5m2},
                                Dtype{"F8_E4M3", Float8_e4m3fn},
                                Dtype{"F8_E8M0", Float8_e8m0fnu},
                                Dtype{"F8_E5M2FNUZ", Float8_e5m2fnuz},
                                Dtype{"F8_E4M3FNUZ", Float8_e4m3fnuz}};

}  // namespace

const char* name_of(at::ScalarType type) {
  const auto* const found = std::ranges::find(kDtypes, type, &Dtype::type);
  return found == kDtypes.end() ? nullptr : found->name;
}

at::ScalarType dtype_named(const std::string& name) {
  const auto* const found = std::ranges::find_if(kDtypes, [&](const Dtype& dtype) { return dtype.name == name; });
  if (found != kDtypes.end()) return found->type;
  std::vector<const char*> known;
  for (const auto& each : kDtypes) known.push_back(each.name);
  throw IoError("has the dtype {}, which is none of {}", nlohmann::json(name).dump(), joined(known));
}

}  // namespace tessera::checkpoint
