// HTTP requests over libcurl: one exchange with a server, signed for S3 if asked.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::s3 {

/// Whose requests these are. Neither the secret nor the token may appear in a message.
struct Credentials {
  std::string id, secret, token = {};
  std::string source = {};  // where they were found, for messages
};

struct HttpRequest {
  std::string method = "GET", url;
  std::vector<std::string> headers = {};  // "name: value", no value empty
  std::span<const std::byte> body = {};
  std::span<std::byte> to = {};  // takes the body of an answer 206
  const Credentials* signer = nullptr;
  std::string region = {};  // for the signature
  long connect_seconds = 10;
};

struct HttpAnswer {
  long status = 0;                                  // 0 if the exchange failed
  std::string failure = {};                         // why it failed
  bool is_lasting = false;                          // whether it would fail again
  std::map<std::string, std::string> headers = {};  // by names in small letters
  std::string body = {};                            // unless it went to HttpRequest::to

  std::string header(const std::string& name) const;
};

/// Any thread may call it. Connections stay open for later calls. Ends when the server is silent for a minute, or after ten minutes.
HttpAnswer exchange(const HttpRequest& request);

/// Encodes all but letters, digits, "-._~" and the characters in `kept`, as signatures demand.
std::string url_encoded(std::string_view text, std::string_view kept = {});

}  // namespace tessera::s3
