// A DenseNet loads files of old versions of torchvision, which have other names for its layers.
#include "tessera/models/densenet.h"

#include <gtest/gtest.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::densenet_test {
namespace {

TEST(DenseNet, LoadsFilesWithOldNames) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    const models::DenseNetOptions options{.stem = 8, .growth = 4, .layers = {1, 2, 1, 1}, .classes = 3};
    models::DenseNet from(options), to(options);
    checkpoint::save(folder / "a", {.model = from.get()}, world);
    checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    auto renames = models::DenseNetImpl::renames();
    renames.insert(renames.begin(), {"(denselayer\\d+\\.(?:norm|conv))([12]\\.)", "$1.$2"});  // as if these were the names in the file
    checkpoint::load_weights(*to, folder / "a.safetensors", {.renamed = renames});
    const auto state = full_state(*from);
    for (const auto& [name, tensor] : full_state(*to)) EXPECT_TRUE(at::equal(tensor, state.at(name))) << name;
  });
}

}  // namespace
}  // namespace tessera::testing::densenet_test
