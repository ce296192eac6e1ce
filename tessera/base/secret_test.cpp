// Proofs are codes as the standards define them, and a file with a secret is read only if others can't read it.
#include "tessera/base/secret.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/sha256.h"
#include "tests/testing/folder.h"

namespace tessera::testing::secret_test {
namespace {

using ::testing::HasSubstr;

std::string hex(const std::string& bytes) {
  return fmt::format("{:02x}", fmt::join(std::vector<uint8_t>(bytes.begin(), bytes.end()), ""));
}

TEST(Sha256, HasTheDigestsOfTheStandards) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Secret, ProvesTheseWordsOnly) {
  EXPECT_TRUE(same_proof(proof_of("secret", {"a", "bc"}), proof_of("secret", {"a", "bc"})));
  for (const auto& other : {proof_of("secret", {"ab", "c"}), proof_of("secret", {"abc"}), proof_of("Secret", {"a", "bc"}), std::string()}) {
    EXPECT_FALSE(same_proof(proof_of("secret", {"a", "bc"}), other));
  }
  EXPECT_EQ(random_secret().size(), 32);
  EXPECT_NE(random_secret(), random_secret());
}

TEST(Secret, IsReadFromAFileOfItsOwnerAlone) {
  const Folder folder;
  const auto path = folder / "secret";
  const auto read_with = [&](const std::string& text, std::filesystem::perms mode) -> std::string {
    write_file(path, text);
    std::filesystem::permissions(path, mode);
    try {
      return given_secret().value_or("none");
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  using std::filesystem::perms;
  const auto own = perms::owner_read | perms::owner_write;
  ::unsetenv("TESSERA_SECRET");
  ::setenv("TESSERA_SECRET_FILE", path.c_str(), 1);
  EXPECT_EQ(read_with("sesame\n", own), "sesame");
  EXPECT_THAT(read_with("sesame\n", own | perms::others_read),
              HasSubstr("may be used by others (mode 0604); make it yours alone: chmod 600"));
  EXPECT_THAT(read_with("sesame\n", own | perms::group_read), HasSubstr("mode 0640"));
  EXPECT_THAT(read_with("\n", own), HasSubstr("is empty; write a random text into it"));
  EXPECT_THAT(read_with(std::string(5000, 'x'), own), HasSubstr("has more than 4096 bytes"));
  ::setenv("TESSERA_SECRET", "first", 1);
  EXPECT_EQ(given_secret(), "first");
  ::unsetenv("TESSERA_SECRET");
  ::setenv("TESSERA_SECRET_FILE", (folder / "none").c_str(), 1);
  EXPECT_THROW(given_secret(), ConfigError);
  ::setenv("TESSERA_SECRET_FILE", folder.path().c_str(), 1);
  EXPECT_THROW(given_secret(), ConfigError);
  ::unsetenv("TESSERA_SECRET_FILE");
  EXPECT_EQ(given_secret(), std::nullopt);
}

}  // namespace
}  // namespace tessera::testing::secret_test
