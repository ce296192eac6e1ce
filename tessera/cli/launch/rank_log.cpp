#include "tessera/cli/launch/rank_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"

namespace tessera::cli {

std::filesystem::path make_rank_folder(const std::filesystem::path& logs, int attempt, int rank) {
  const auto folder = logs / fmt::format("attempt_{}", attempt) / fmt::format("rank_{}", rank);
  make_folder(folder);
  return folder;
}

LogFile::LogFile(std::filesystem::path path) : path_(std::move(path)) {
  file_ = Fd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file_) throw IoError("the log {} can't be written: {}", path_, std::strerror(errno));
}

void LogFile::write(std::string_view bytes) {
  while (file_ && !bytes.empty()) {
    const auto count = ::write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (reason_ == 0) reason_ = errno;
      lost_ += bytes.size();
      return;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

std::optional<std::string> LogFile::trouble() const {
  if (lost_ == 0) return std::nullopt;
  return fmt::format("{} lost {} bytes: {}", path_.string(), lost_, std::strerror(reason_));
}

}  // namespace tessera::cli
