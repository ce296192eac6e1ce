#include "tessera/s3/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <random>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/s3/xml.h"

namespace tessera::s3 {
namespace {

constexpr int kAttempts = 7;
constexpr auto kFirstPause = std::chrono::milliseconds(200);
constexpr std::time_t kRenewAgain = 30;  // seconds after a renewal of credentials that failed

/// Waits longer after each attempt, and not as long as other ranks that failed at the same moment.
void pause_after(int attempt) {
  static thread_local std::minstd_rand source{std::random_device()()};
  std::uniform_real_distribution<double> part(0.5, 1);
  std::this_thread::sleep_for(kFirstPause * (1 << std::min(attempt, 6)) * part(source));
}

bool is_done(const Request& request, const HttpAnswer& answer) {
  // Some errors come as an answer 200. A list that is cut off would hide objects.
  if (answer.status / 100 == 2) return request.root.empty() || answer.body.find("</" + request.root + ">") != std::string::npos;
  return answer.status == 404;
}

bool may_succeed_later(const HttpAnswer& answer) {
  constexpr std::array kPassing = {"", "InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling", "BadDigest"};
  const auto status = answer.status;
  if (status == 0) return !answer.is_lasting;
  if (status == 429 || status == 500 || status == 502 || status == 503 || status == 504) return true;
  return (status / 100 == 2 || status == 400) && std::ranges::find(kPassing, xml_text(answer.body, "Code")) != kPassing.end() &&
         !(status == 400 && answer.body.empty());
}

std::string advice_for(const HttpAnswer& answer, const std::string& code, const Credentials& signer) {
  const auto region = answer.header("x-amz-bucket-region");
  if (answer.status == 0) return "check the network, and AWS_ENDPOINT_URL if the store is not Amazon's";
  if (code == "NoSuchBucket") return "make the bucket, or check its name and AWS_ENDPOINT_URL";
  if (answer.status == 404) return "there is no such object";
  if (answer.status == 416) return "the object has become shorter";
  if (code == "RequestTimeTooSkewed") return "set the clock of this host";
  if (answer.status / 100 == 3 || code == "AuthorizationHeaderMalformed")
    return region.empty() ? "set AWS_REGION to the region of the bucket" : fmt::format("set AWS_REGION to {}", printable(region));
  if (answer.status == 401 || answer.status == 403)
    return fmt::format("check that the credentials of {} are right and may read, write, list and remove there", signer.source);
  if (answer.status >= 500 || answer.status == 429) return "try again later; AWS_MAX_ATTEMPTS sets how often it is tried";
  return "check AWS_ENDPOINT_URL and AWS_REGION";
}

}  // namespace

Settings Client::settings() {
  const std::lock_guard lock(mutex_);
  if (!settings_) settings_ = find_settings();
  return *settings_;
}

Credentials Client::credentials() {
  const auto where = settings();
  const std::lock_guard lock(mutex_);
  if (!found_ || (found_->until > 0 && std::time(nullptr) >= found_->until)) {
    try {
      found_ = find_credentials(where);
    } catch (const Error&) {
      if (!found_) throw;
      found_->until = std::time(nullptr) + kRenewAgain;  // these still count for a while
    }
  }
  return found_->credentials;
}

std::string Client::url_of(const Request& request) {
  const auto where = settings();
  const auto key = url_encoded(request.key, "/"), query = request.query.empty() ? "" : "?" + request.query;
  if (!where.endpoint.empty()) return fmt::format("{}/{}{}{}{}", where.endpoint, request.bucket, key.empty() ? "" : "/", key, query);
  // Amazon's certificates do not cover hosts whose bucket has a dot.
  const auto domain = fmt::format("s3.{}.amazonaws.com{}", where.region, where.region.starts_with("cn-") ? ".cn" : "");
  if (request.bucket.find('.') != std::string::npos) return fmt::format("https://{}/{}/{}{}", domain, request.bucket, key, query);
  return fmt::format("https://{}.{}/{}{}", request.bucket, domain, key, query);
}

HttpAnswer Client::send(const Request& request) {
  const auto attempts = request.attempts > 0 ? request.attempts : static_cast<int>(env_int("AWS_MAX_ATTEMPTS", 1, 100).value_or(kAttempts));
  HttpRequest http{.method = request.method, .url = url_of(request), .headers = request.headers, .body = request.body, .to = request.to};
  http.region = settings().region;
  if (request.method == "PUT" || request.method == "POST") http.headers.emplace_back("Content-Type: application/octet-stream");
  HttpAnswer answer;
  for (int attempt = 0; attempt < attempts; attempt++) {
    if (attempt > 0) pause_after(attempt - 1);
    const auto signer = credentials();
    http.signer = &signer;
    answer = exchange(http);
    if (is_done(request, answer)) return answer;
    // An answer to HEAD does not say why.
    const bool perhaps_expired =
        attempt == 0 && request.method == "HEAD" && !signer.token.empty() && (answer.status == 400 || answer.status == 403);
    if (perhaps_expired || xml_text(answer.body, "Code") == "ExpiredToken") {
      const std::lock_guard lock(mutex_);
      found_.reset();  // somebody may have renewed them
    } else if (!may_succeed_later(answer)) {
      break;
    }
    log(LogLevel::Info, "{} of s3://{}/{}: attempt {} of {} failed: {}", request.method, request.bucket, request.key, attempt + 1, attempts,
        answer.failure.empty() ? fmt::format("status {}", answer.status) : answer.failure);
  }
  fail(request, answer);
}

void Client::fail(const Request& request, const HttpAnswer& answer) {
  const auto where = settings().endpoint.empty() ? "Amazon's store" : "the store at " + settings().endpoint;
  const auto code = xml_text(answer.body, "Code"), text = xml_text(answer.body, "Message");
  const auto says = answer.status == 0
                        ? fmt::format("can't be reached: {}", answer.failure)
                        : fmt::format("says {}{}{}{}", answer.status, code.empty() ? "" : " ", code, text.empty() ? "" : " (" + text + ")");
  throw IoError("s3://{}/{}: {} {}; {}", request.bucket, request.key, where, printable(says), advice_for(answer, code, credentials()));
}

}  // namespace tessera::s3
