// Folders of torch.distributed.checkpoint: those that ranks of ours write, and damaged ones. What Python says of them is in
// torch/python_test.cpp.
#include "tessera/checkpoint/formats/dcp/dcp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/dcp/names.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"
#include "tests/testing/folder.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::dcp_test {
namespace {

namespace dcp = checkpoint::dcp;
namespace pickle = checkpoint::pickle;
using checkpoint::CatalogReader;
using checkpoint::DcpItem;
using checkpoint::DcpRankWriter;
using checkpoint::read_dcp;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TensorSlice rows(int64_t begin, int64_t count) {
  return {.shape = {3, 2}, .offsets = {begin, 0}, .sizes = {count, 2}};
}
at::Tensor weight() {
  return at::arange(6, at::kBFloat16).view({3, 2});
}

/// Writes the file of one of two ranks: its rows, and values that both ranks have.
std::vector<DcpItem> write_rank(const std::filesystem::path& folder, int rank) {
  DcpRankWriter writer(folder, rank);
  const auto own = rank == 0 ? rows(0, 2) : rows(2, 1);
  writer.write({"model", "a.weight"}, own, view_of(weight(), own));
  writer.write({"model", "step"}, whole_slice({}), at::full({}, 7, at::kLong));
  if (rank == 0) writer.write({"groups", int64_t{0}, "lr"}, 0.5);
  writer.write({"epoch"}, pickle::Dict{{{"number", int64_t{3}}}});
  return writer.close();
}

/// The items of both ranks, sent as JSON as they are to rank 0.
std::vector<DcpItem> write_both(const std::filesystem::path& folder) {
  std::vector<DcpItem> all;
  for (int rank = 0; rank < 2; rank++) {
    const auto sent = nlohmann::json(write_rank(folder, rank)).dump();
    std::ranges::move(nlohmann::json::parse(sent).get<std::vector<DcpItem>>(), std::back_inserter(all));
  }
  return all;
}

TEST(Dcp, ReadsWhatRanksWrite) {
  const Folder folder;
  const auto items = write_both(folder.path());
  EXPECT_THAT([&] { read_dcp(folder.path()); }, ThrowsMessage<IoError>(HasSubstr("not finished: it has no .metadata")));
  checkpoint::write_dcp_metadata(folder.path(), items);
  write_file(folder / "__7_0.distcp", "of a former world");
  const CatalogReader reader(read_dcp(folder.path()));
  const auto& catalog = reader.catalog();
  EXPECT_EQ(catalog.files.size(), 2U);
  ASSERT_EQ(catalog.tensors.size(), 2U);
  EXPECT_EQ(catalog.tensors.at("model.a.weight").boxes.size(), 2U);
  EXPECT_EQ(catalog.tensors.at("model.step").boxes.size(), 1U) << "both ranks have written it";
  EXPECT_TRUE(same_values(reader.read("model.a.weight"), weight()));
  EXPECT_EQ(reader.read("model.step").item<int64_t>(), 7);
  EXPECT_EQ(catalog.values, (std::map<std::string, nlohmann::json>{{"groups.0.lr", 0.5}, {"epoch", {{"number", 3}}}}));
  EXPECT_EQ(catalog.checksums.size(), 3U);
  for (const auto& checksum : catalog.checksums) reader.verify(checksum);
}

TEST(Dcp, RefusesPartsThatAreNoTensor) {
  const Folder folder;
  const auto items = write_both(folder.path());
  const auto refused = [&](const auto& change, const std::string& why) {
    auto wrong = items;
    change(wrong);
    EXPECT_THAT([&] { checkpoint::write_dcp_metadata(folder.path(), wrong); }, ThrowsMessage<UsageError>(HasSubstr(why)));
  };
  refused([](auto& all) { all.erase(all.begin()); }, "the parts of 'model.a.weight' have 2 of its 6 values");
  refused([](auto& all) { all[0].part->box = rows(0, 3); }, "[0:3, 0:2] and [2:3, 0:2] of 'model.a.weight' overlap");
  refused([](auto& all) { all[0].part->dtype = at::kFloat; }, "'model.a.weight' differ in dtype or shape");
  refused([](auto& all) { all[0].part.reset(); }, "'model.a.weight' differ in dtype or shape");
  refused([](auto& all) { all[0].path = {"model", "a", "weight"}; }, "the keys of two values, joined by dots, are both 'model.a.weight'");
  EXPECT_FALSE(std::filesystem::exists(folder / ".metadata"));
  DcpRankWriter writer(folder.path(), 0);
  EXPECT_THAT([&] { writer.write({"w"}, rows(2, 2), at::ones({2, 2})); }, ThrowsMessage<UsageError>(HasSubstr("outside of its shape")));
  EXPECT_THAT(
      [&] {
        writer.write({"w"}, rows(0, 2), at::ones({2, 1}));
      },
      ThrowsMessage<UsageError>(HasSubstr("part [0:2, 0:2] of 'w' was given values of the shape [2, 1]")));
}

/// Changes the metadata of a folder.
class Metadata {
 public:
  explicit Metadata(std::filesystem::path folder) : folder_(std::move(folder)) {
    checkpoint::write_dcp_metadata(folder_, write_both(folder_));
    text_ = read_file(folder_ / dcp::kFile);
    text_.replace(text_.find(dcp::kNote), std::string_view(dcp::kNote).size(), "another");  // so that the reader finds no checksums
  }
  /// Replaces text of the same length.
  void refused(const std::string& from, const std::string& to, const std::string& why) const {
    auto text = text_;
    const auto place = text.find(from);
    ASSERT_NE(place, std::string::npos) << from;
    text.replace(place, from.size(), to);
    write_file(folder_ / dcp::kFile, text);
    EXPECT_THAT([&] { read_dcp(folder_); }, ThrowsMessage<IoError>(AllOf(HasSubstr(folder_.string()), HasSubstr(why)))) << to;
  }
  const std::string& text() const { return text_; }

 private:
  std::filesystem::path folder_;
  std::string text_;
};

TEST(Dcp, RefusesWhatItDoesNotKnow) {
  const Folder folder;
  const Metadata metadata(folder.path());
  metadata.refused("1.0.0", "2.0.0", "the version '2.0.0', but Tessera reads only 1.0.0");
  metadata.refused("BytesStorageMetadata", "OtherStorageMetadata", "refers to torch.distributed.checkpoint.metadata.OtherStorageMetadata");
  metadata.refused("__0_0.distcp", "../../passwd", "'../../passwd', which is not a file of this folder");
  metadata.refused("__0_0.distcp", "__3_0.distcp", "__3_0.distcp");
  metadata.refused("bfloat16", "float8_x", "refers to torch.float8_x");
  metadata.refused("storage_data", "storage_date", "no field 'storage_data'");
  metadata.refused("offsets", "offsetx", "no field 'offsets'");
  metadata.refused("relative_path", "relative_pa??", "no field 'relative_path'");
  metadata.refused("fqn", "fq?", "no field 'fqn'");
}

TEST(Dcp, ReadsOlderMetadata) {
  const Folder folder;
  const auto items = write_rank(folder.path(), 1);  // the metadata below names only the tensor with one value
  const auto made = [](const std::string& name, std::vector<pickle::Value> arguments, pickle::Value state = {}) {
    return pickle::Object{.name = name, .arguments = std::move(arguments), .state = std::move(state)};
  };
  using Entries = std::vector<std::pair<pickle::Value, pickle::Value>>;
  const auto dict = [](Entries entries) -> pickle::Value { return pickle::Dict{.entries = std::move(entries)}; };
  const pickle::Value size = made(dcp::kSize, {pickle::Tuple{}});
  // This is how CPython 3.11.2 pickles members of an enum.
  const auto format = made("builtins.getattr", {pickle::Global{dcp::kOldMemoryFormat}, "TORCH_CONTIGUOUS_FORMAT"});
  const auto layout = made(dcp::kLayout, {"torch.strided"});
  const auto properties =
      made(dcp::kOldProperties, {}, pickle::Tuple{.items = {pickle::Global{"torch.int64"}, layout, false, format, false}});
  const pickle::Value chunk = made(dcp::kChunk, {}, dict({{"offsets", size}, {"sizes", size}}));
  const auto tensor =
      made(dcp::kTensor, {}, dict({{"properties", properties}, {"size", size}, {"chunks", pickle::List{.items = {chunk}}}}));
  const auto index = made(dcp::kIndex, {}, dict({{"fqn", "step"}, {"index", int64_t{0}}, {"offset", size}}));
  const auto place = made(dcp::kStorageInfo, {},
                          dict({{"relative_path", items[1].file},
                                {"offset", static_cast<int64_t>(items[1].offset)},
                                {"length", static_cast<int64_t>(items[1].bytes)}}));
  const auto meta = made(dcp::kStorageMeta, {}, dict({{"checkpoint_id", made("pathlib.PosixPath", {"some", "path"})}}));
  const pickle::Value metadata = made(dcp::kMetadata, {},
                                      dict({{"state_dict_metadata", dict({{"step", tensor}})},
                                            {"planner_data", {}},
                                            {"storage_data", dict({{index, place}})},
                                            {"storage_meta", meta}}));
  write_file(folder / dcp::kFile, pickle::write(metadata));
  EXPECT_EQ(CatalogReader(read_dcp(folder.path())).read("step").item<int64_t>(), 7);
}

TEST(Dcp, KnowsWhatWasWritten) {
  const Folder folder;
  checkpoint::write_dcp_metadata(folder.path(), write_both(folder.path()), 17);
  EXPECT_EQ(read_dcp(folder.path()).save->number, 17U);
  const auto whole = read_file(folder / dcp::kFile);
  for (const auto* name : {"epoch", "groups", "lr", "a.weight"}) {  // only the checksums show that a name has changed
    auto text = whole;
    for (size_t place = 0; (place = text.find(name, place)) != std::string::npos; place++) text[place] ^= 1;
    write_file(folder / dcp::kFile, text);
    EXPECT_THAT([&] { read_dcp(folder.path()); }, ThrowsMessage<IoError>(HasSubstr("it has another checksum than when it was written")))
        << name;
  }
  write_file(folder / dcp::kFile, whole);
  DcpRankWriter writer(folder.path(), 1);  // of a later save
  const auto own = rows(2, 1);
  writer.write({"model", "a.weight"}, own, view_of(weight(), own) + 1);
  writer.write({"model", "step"}, whole_slice({}), at::full({}, 7, at::kLong));
  writer.write({"epoch"}, pickle::Dict{{{"number", int64_t{3}}}});
  writer.close();
  EXPECT_THAT([&] { read_dcp(folder.path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("__1_0.distcp at byte 0, where 'model.a.weight' is,"), HasSubstr("of another save"))));
}

TEST(Dcp, EveryDamageIsAnErrorOrHarmless) {
  const Folder folder;
  const Metadata metadata(folder.path());
  const auto read_all = [&] {
    const CatalogReader reader(read_dcp(folder.path()));
    for (const auto& checksum : reader.catalog().checksums) reader.verify(checksum);
    for (const auto& [name, tensor] : reader.catalog().tensors) reader.read(name);
  };
  const auto damage = [&](const std::string& name, const std::string& whole) {
    for (size_t length = 0; length < whole.size(); length += 2) {
      write_file(folder / name, whole.substr(0, length));
      EXPECT_THAT(read_all, ThrowsMessage<IoError>(HasSubstr(folder.path().string()))) << name << " " << length;
      auto damaged = whole;
      damaged[length] = static_cast<char>(damaged[length] ^ (1 << (length % 8)));
      write_file(folder / name, damaged);
      try {
        read_all();
      } catch (const IoError&) {  // no other exception may come
      }
    }
    write_file(folder / name, whole);
  };
  damage(dcp::kFile, metadata.text());
  damage("__0_0.distcp", read_file(folder / "__0_0.distcp"));
  read_all();
}

TEST(Dcp, LeavesOutWhatIsNoPlainValue) {
  const Folder folder;
  auto items = write_both(folder.path());
  const auto content = pickle::write(pickle::Object{.name = "some.Scheduler", .arguments = {"x"}});
  NewFile file(folder / "__2_0.distcp");
  checkpoint::ZipWriter zip(file);
  zip.add("archive/data.pkl", content);
  items.push_back({.path = {"scheduler"}, .file = "__2_0.distcp", .bytes = zip.close(), .checksum = zip.checksum()});
  file.commit();
  checkpoint::write_dcp_metadata(folder.path(), items);
  const auto catalog = read_dcp(folder.path());
  EXPECT_FALSE(catalog.values.contains("scheduler"));
  EXPECT_TRUE(catalog.values.contains("epoch"));
}

}  // namespace
}  // namespace tessera::testing::dcp_test
