#include "tessera/s3/http.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::s3 {
namespace {

constexpr size_t kMostText = size_t{64} << 20;  // of any answer but a range of an object

struct CurlEnd {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
using CurlHandle = std::unique_ptr<CURL, CurlEnd>;

/// Handles that nobody uses, with their open connections.
struct CurlHandles {
  std::mutex mutex;
  std::vector<CurlHandle> free;

  CurlHandle take() {
    const std::lock_guard lock(mutex);
    if (free.empty()) return CurlHandle(curl_easy_init());
    auto handle = std::move(free.back());
    free.pop_back();
    return handle;
  }
  void give_back(CurlHandle handle) {
    curl_easy_reset(handle.get());
    const std::lock_guard lock(mutex);
    free.push_back(std::move(handle));
  }
};

/// Never destroyed, because the libraries below libcurl clean up at an unknown moment of the process's end.
CurlHandles& curl_handles() {
  static auto& handles = [&]() -> CurlHandles& {
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) throw Error("libcurl can't be initialised");
    return *new CurlHandles;
  }();
  return handles;
}

struct Receiving {
  CURL* handle;
  std::span<std::byte> to;
  std::string text = {};
  size_t filled = 0;
};

size_t take_body(char* bytes, size_t, size_t count, void* to) {
  auto& receiving = *static_cast<Receiving*>(to);
  long status = 0;
  curl_easy_getinfo(receiving.handle, CURLINFO_RESPONSE_CODE, &status);
  if (status != 206 || receiving.to.empty()) {
    if (receiving.text.size() + count > kMostText) return 0;
    receiving.text.append(bytes, count);
    return count;
  }
  if (count > receiving.to.size() - receiving.filled) return 0;
  std::memcpy(receiving.to.data() + receiving.filled, bytes, count);
  receiving.filled += count;
  return count;
}

size_t take_header(char* bytes, size_t, size_t count, void* to) {
  const std::string_view line(bytes, count);
  auto& headers = *static_cast<std::map<std::string, std::string>*>(to);
  if (line.starts_with("HTTP/")) headers.clear();  // those so far were of "100 Continue"
  if (const auto colon = line.find(':'); colon != std::string_view::npos) {
    const auto begin = std::min(line.find_first_not_of(" \t", colon + 1), line.size());
    const auto end = line.find_last_not_of(" \t\r\n") + 1;
    headers[lower(line.substr(0, colon))] = line.substr(begin, end > begin ? end - begin : 0);
  }
  return count;
}

bool is_lasting_failure(CURLcode code) {
  return code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT || code == CURLE_PEER_FAILED_VERIFICATION ||
         code == CURLE_SSL_CACERT_BADFILE || code == CURLE_WRITE_ERROR || code == CURLE_NOT_BUILT_IN;
}

void sign(CURL* handle, const HttpRequest& request, std::vector<std::string>& headers) {
  const auto& signer = *request.signer;
  // Without it, libcurl would send the id and the secret as they are.
  if (curl_easy_setopt(handle, CURLOPT_AWS_SIGV4, fmt::format("aws:amz:{}:s3", request.region).c_str()) != CURLE_OK)
    throw ConfigError("this libcurl can't sign requests to s3://; use one that is built with AWS SIGV4");
  curl_easy_setopt(handle, CURLOPT_USERNAME, signer.id.c_str());
  curl_easy_setopt(handle, CURLOPT_PASSWORD, signer.secret.c_str());
  // Checksums guard the body; hashing it here as well would take longer than sending it.
  headers.emplace_back("x-amz-content-sha256: UNSIGNED-PAYLOAD");
  if (!signer.token.empty()) headers.push_back("x-amz-security-token: " + signer.token);
}

}  // namespace

std::string HttpAnswer::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

HttpAnswer exchange(const HttpRequest& request) {
  auto owner = curl_handles().take();
  auto* const handle = owner.get();
  if (handle == nullptr) throw Error("libcurl has no memory for a connection");
  HttpAnswer answer;
  Receiving receiving{.handle = handle, .to = request.to};
  char why[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(handle, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(handle, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_TCP_KEEPALIVE, 1L);
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, request.connect_seconds);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, 60L);
  curl_easy_setopt(handle, CURLOPT_TIMEOUT, 600L);
  curl_easy_setopt(handle, CURLOPT_EXPECT_100_TIMEOUT_MS, 200L);
  curl_easy_setopt(handle, CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
  curl_easy_setopt(handle, CURLOPT_BUFFERSIZE, 256L << 10);
  curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, why);
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, &receiving);
  curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, take_header);
  curl_easy_setopt(handle, CURLOPT_HEADERDATA, &answer.headers);
  if (const auto bundle = env("AWS_CA_BUNDLE")) curl_easy_setopt(handle, CURLOPT_CAINFO, bundle->c_str());
  auto headers = request.headers;
  if (request.method == "HEAD") {
    curl_easy_setopt(handle, CURLOPT_NOBODY, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    // A body in memory that libcurl can send again by itself.
    curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(handle, CURLOPT_POSTFIELDS, request.body.empty() ? "" : reinterpret_cast<const char*>(request.body.data()));
    curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  } else {
    curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  if (request.signer != nullptr) sign(handle, request, headers);
  std::unique_ptr<curl_slist, CurlEnd> list;
  for (const auto& header : headers) {
    if (auto* const longer = curl_slist_append(list.get(), header.c_str())) {
      list.release();
      list.reset(longer);
    }
  }
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, list.get());
  const auto code = curl_easy_perform(handle);
  curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &answer.status);
  answer.body = std::move(receiving.text);
  if (code == CURLE_OK && answer.status == 206 && receiving.filled != request.to.size()) {
    answer.failure = fmt::format("the answer has {} bytes of {}", receiving.filled, request.to.size());
  } else if (code != CURLE_OK) {
    answer.failure = why[0] != '\0' ? why : curl_easy_strerror(code);
    answer.is_lasting = is_lasting_failure(code);
  }
  if (!answer.failure.empty()) answer.status = 0;
  curl_handles().give_back(std::move(owner));
  return answer;
}

std::string url_encoded(std::string_view text, std::string_view kept) {
  std::string encoded;
  for (const char letter : text) {
    const bool is_plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || (letter >= '0' && letter <= '9');
    if (is_plain || std::string_view("-._~").find(letter) != std::string_view::npos || kept.find(letter) != std::string_view::npos) {
      encoded += letter;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(letter));
    }
  }
  return encoded;
}

}  // namespace tessera::s3
