// Reads what an object of a data file holds: a text, a conversation in one of the usual forms, or a pair to compare. It needs
// nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "tessera/llm/chat.h"

namespace tessera::llm {

struct Document {
  std::vector<Segment> segments;
  bool by_template = false;  // whether a template wrote it, with the tokens at its begin and end
};

/// Returns a document, or the two of a pair, the chosen one first. Throws UsageError, also for a conversation without a template.
std::vector<Document> documents_in(const nlohmann::ordered_json& line, const ChatTemplate* chat);

}  // namespace tessera::llm
