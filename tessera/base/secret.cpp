#include "tessera/base/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/sha256.h"

namespace tessera {
namespace {

constexpr size_t kLongestSecret = 4096;

std::string secret_in(const std::string& path) {
  const auto refuse = [&](std::string_view why) { return ConfigError("TESSERA_SECRET_FILE={} {}", path, why); };
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!file || ::fstat(file.get(), &status) != 0) throw refuse(fmt::format("can't be read: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw refuse("is not a file");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw refuse(fmt::format("may be used by others (mode {:04o}); make it yours alone: chmod 600 {}", status.st_mode & 07777, path));
  }
  std::string text(kLongestSecret + 1, '\0');
  const auto count = ::read(file.get(), text.data(), text.size());
  if (count < 0) throw refuse(fmt::format("can't be read: {}", std::strerror(errno)));
  text.resize(static_cast<size_t>(count));
  if (text.size() > kLongestSecret) throw refuse(fmt::format("has more than {} bytes", kLongestSecret));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  if (text.empty()) throw refuse("is empty; write a random text into it, such as that of openssl rand -hex 16");
  return text;
}

}  // namespace

std::optional<std::string> given_secret() {
  if (auto text = env("TESSERA_SECRET")) return text;
  const auto path = env("TESSERA_SECRET_FILE");
  return path ? std::optional(secret_in(*path)) : std::nullopt;
}

std::string random_secret() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

std::string proof_of(std::string_view secret, std::initializer_list<std::string_view> words) {
  std::string message;
  for (const auto word : words) message += fmt::format("{}:{}", word.size(), word);  // so other words never make the same message
  return hmac_sha256(secret, message);
}

bool same_proof(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char differences = 0;
  for (size_t i = 0; i < a.size(); i++) differences = differences | static_cast<unsigned char>(a[i] ^ b[i]);
  return differences == 0;
}

}  // namespace tessera
