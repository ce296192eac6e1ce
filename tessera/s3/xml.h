// Reads the few elements that are needed of the flat XML texts with which object stores answer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::s3 {

/// The texts of all elements of this name, which have no attributes and no elements in them.
std::vector<std::string> xml_texts(std::string_view xml, std::string_view name);
/// Returns the text of the first such element; empty if there is none.
std::string xml_text(std::string_view xml, std::string_view name);

}  // namespace tessera::s3
