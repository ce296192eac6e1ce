// Client: requests to an object store that speaks S3, made again where the store or the network is at fault.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/s3/http.h"
#include "tessera/s3/settings.h"

namespace tessera::s3 {

struct Request {
  std::string method = "GET", bucket, key = {};
  std::string query = {};  // encoded, its names sorted and each with a "=", because libcurl signs it as it is
  std::vector<std::string> headers = {};
  std::span<const std::byte> body = {};
  std::span<std::byte> to = {};
  std::string root = {};  // the root element that a good answer has
  int attempts = 0;       // 0: AWS_MAX_ATTEMPTS, or 7
};

/// Any thread may call it.
class Client {
 public:
  /// Returns an answer of the status 2xx or 404. Throws IoError for any other, and if all attempts have failed.
  HttpAnswer send(const Request& request);
  /// Throws the IoError for an answer that the caller can't use.
  [[noreturn]] void fail(const Request& request, const HttpAnswer& answer);

 private:
  Settings settings();
  Credentials credentials();
  std::string url_of(const Request& request);

  std::mutex mutex_;
  std::optional<Settings> settings_;
  std::optional<FoundCredentials> found_;
};

}  // namespace tessera::s3
