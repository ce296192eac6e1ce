#include "tessera/train/display.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "tessera/base/env.h"

namespace tessera::train {
namespace {

constexpr int kUsualColumns = 80;

int columns_of(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  try {
    return static_cast<int>(env_int("COLUMNS", 1, 10000).value_or(kUsualColumns));
  } catch (const std::exception&) {  // COLUMNS belongs to the shell, so a wrong value is not an error
    return kUsualColumns;
  }
}

}  // namespace

Glyphs glyphs_of_locale() {
  for (const auto* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    auto locale = env(name);
    if (!locale) continue;
    std::ranges::transform(*locale, locale->begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const bool unicode = locale->find("utf-8") != std::string::npos || locale->find("utf8") != std::string::npos;
    return unicode ? Glyphs::Blocks : Glyphs::Ascii;
  }
  return Glyphs::Ascii;
}

Display Display::of(std::FILE* file) {
  const int fd = ::fileno(file);
  const bool terminal = ::isatty(fd) != 0 && env("TERM") != "dumb";
  return {
      // Writes through the program's own stream, to keep the order with the program's other output.
      .write =
          [file](std::string_view text) {
            std::fwrite(text.data(), 1, text.size(), file);
            std::fflush(file);
          },
      .columns = [fd, terminal] { return terminal ? std::optional(columns_of(fd)) : std::nullopt; },
      .glyphs = glyphs_of_locale(),
  };
}

}  // namespace tessera::train
