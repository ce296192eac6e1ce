// The protocol of the store that rank 0 serves to the ranks of a job.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::store_protocol {

/// First both sides prove that they know the secret, with a number of each side that is used only once:
///   client: kHello, its number
///   server: kHello, its number
///   client: client_proof()
///   server: kWelcome and server_proof(), or kRefused
/// The server just hangs up on anything else, but sends its kHello to a client of another version.
inline constexpr std::string_view kHello = "tessera store 3\n";
inline constexpr std::string_view kAnyVersion = "tessera store ";
inline constexpr std::string_view kWelcome = "tessera welcome\n";
inline constexpr std::string_view kRefused = "tessera refused\n";
inline constexpr size_t kNumberBytes = 32;  // those of random_secret()

struct Numbers {
  std::string client, server;
};
std::string client_proof(const std::string& secret, const Numbers& numbers);
std::string server_proof(const std::string& secret, const Numbers& numbers);

/// Then the client sends requests, and the server answers each with a sized text. A request is a sized frame of sized fields, of which the
/// first is the verb. The comments name the other fields and, after ->, the answer.
inline constexpr auto kSet = "set";             // key, value
inline constexpr auto kGet = "get";             // key -> value
inline constexpr auto kAdd = "add";             // key, number -> the sum
inline constexpr auto kCompareSet = "compare";  // key, expected, desired -> the value afterwards
inline constexpr auto kCheck = "check";         // keys -> "1" if all exist, else "0"
inline constexpr auto kDelete = "delete";       // key -> "1" if it existed, else "0"
inline constexpr auto kCount = "count";         // -> the number of keys
inline constexpr size_t kLongestFrame = 1 << 26;

using Fields = std::vector<std::string>;

/// Makes a field or a frame: the length as four bytes, and the bytes.
std::string sized(std::string_view bytes);
/// Removes a sized text from the front of `bytes` and returns it. Returns nothing if it is not complete yet. Throws IoError if it is longer
/// than allowed.
std::optional<std::string> take_sized(std::string& bytes, size_t longest);

std::string pack(const Fields& fields);
/// Throws IoError if the bytes are not a sequence of fields.
Fields unpack(std::string_view frame);

}  // namespace tessera::store_protocol
