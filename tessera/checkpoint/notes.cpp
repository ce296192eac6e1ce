#include "tessera/checkpoint/notes.h"

#include <fmt/format.h>

#include <vector>

#include "tessera/base/words.h"

namespace tessera::checkpoint {

void Note::refuse(std::string_view why) const {
  throw UsageError("the note{} is '{}': {}", name_.empty() ? "" : fmt::format(" '{}'", name_), text_, why);
}

Note Notes::at(const std::string& name) const {
  const auto found = notes_.find(name);
  if (found == notes_.end()) {
    std::vector<std::string> names;
    for (const auto& [known, note] : notes_) names.push_back(known);
    throw UsageError("there is no note '{}'; {}", name, names.empty() ? "there are none" : "there are " + some_of(names));
  }
  auto note = found->second;
  note.name_ = name;
  return note;
}

}  // namespace tessera::checkpoint
