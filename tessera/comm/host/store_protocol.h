// The protocol of the store that rank 0 serves to the ranks of a job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::store_protocol {

/// First the client sends kHello and the secret as a field. The server answers one of the next two, or just hangs up.
inline constexpr std::string_view kHello = "tessera store 1\n";
inline constexpr std::string_view kWelcome = "tessera welcome\n";
inline constexpr std::string_view kRefused = "tessera refused\n";
inline constexpr size_t kLongestSecret = 4096;

/// Then the client sends requests and gets an answer to each. Both are frames: a length and as many bytes, which are a sequence of fields.
/// The first field of a request is its verb, the first of an answer is kDone or kLate.
inline constexpr std::string_view kDone = "done", kLate = "late";
inline constexpr std::string_view kSet = "set";             // key, value
inline constexpr std::string_view kGet = "get";             // key -> value
inline constexpr std::string_view kAdd = "add";             // key, number -> the sum
inline constexpr std::string_view kCompareSet = "compare";  // key, expected, desired -> the value after it
inline constexpr std::string_view kCheck = "check";         // keys -> "1" if all exist, else "0"
inline constexpr std::string_view kWait = "wait";           // milliseconds, keys; answered when all exist, or late
inline constexpr std::string_view kDelete = "delete";       // key -> "1" if it existed, else "0"
inline constexpr std::string_view kCount = "count";         // -> the number of keys
inline constexpr size_t kLongestFrame = 1 << 26;

using Fields = std::vector<std::string>;

/// A field, or a frame: a length as four bytes, and the bytes.
std::string sized(std::string_view bytes);
/// Removes a sized text from the front. Nothing if it is not complete yet. Throws IoError if it is longer than allowed.
std::optional<std::string> take_sized(std::string& bytes, size_t longest);

std::string pack(const Fields& fields);
/// Throws IoError if the bytes are not a sequence of fields.
Fields unpack(std::string_view frame);

}  // namespace tessera::store_protocol
