#include "tessera/base/loaded_libtorch.h"

#include <caffe2/core/common.h>
#include <torch/headeronly/version.h>

#include "tessera/base/error.h"
#include "tessera/version.h"

namespace tessera {
namespace {

/// "2.13" of "2.13.0".
std::string_view minor_version(std::string_view version) {
  const auto major = version.find('.');
  return major == version.npos ? version : version.substr(0, version.find('.', major + 1));
}

}  // namespace

std::string loaded_libtorch() {
  const auto& options = caffe2::GetBuildOptions();
  const auto found = options.find("TORCH_VERSION");
  return found == options.end() ? std::string() : found->second;
}

void expect_fitting_libtorch(std::string_view loaded) {
  if (loaded.empty() || minor_version(loaded) == minor_version(TORCH_VERSION)) return;
  throw UsageError(
      "this process has loaded libtorch {}, but Tessera {} was built with libtorch {}, and minor versions of libtorch have different ABIs; "
      "load a libtorch {}, or build Tessera with the one that the program loads (TESSERA_TORCH)",
      loaded, TESSERA_VERSION, TORCH_VERSION, minor_version(TORCH_VERSION));
}

}  // namespace tessera
