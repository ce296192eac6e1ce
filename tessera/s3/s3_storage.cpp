// The storage of paths s3://BUCKET/KEY.
#include <libdeflate.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <future>
#include <random>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"
#include "tessera/s3/client.h"
#include "tessera/s3/xml.h"

namespace tessera::s3 {
namespace {

constexpr size_t kConnections = 4;  // of one upload, or of one read
constexpr size_t kPieceOfRead = size_t{16} << 20;
constexpr auto kUploadName = "x-amz-meta-tessera-upload";

/// Runs tasks on threads of their own, at most kConnections at a time, and ends them in their order.
class Lanes : NoCopy {
 public:
  ~Lanes() { drop_all(); }
  void add(std::function<void()> act) {
    if (tasks_.size() == kConnections) end_first();
    std::packaged_task<void()> task(std::move(act));
    auto result = task.get_future();
    tasks_.push_back({.thread = quiet_thread(std::move(task)), .result = std::move(result)});
  }
  /// Throws the error of the first task that failed.
  void end_all() {
    while (!tasks_.empty()) end_first();
  }
  /// Waits for the tasks, however they end.
  void drop_all() {
    for (auto& task : tasks_) task.thread.join();
    tasks_.clear();
  }

 private:
  struct Task {
    std::thread thread;
    std::future<void> result;
  };
  void end_first() {
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    task.thread.join();
    task.result.get();
  }
  std::deque<Task> tasks_;
};

/// BUCKET/KEY, whose key may be empty.
Request request_for(const std::string& method, const std::string& name) {
  const auto slash = std::min(name.find('/'), name.size());
  if (slash == 0) throw UsageError("s3:// names no bucket; write s3://BUCKET/NAME");
  auto bucket = name.substr(0, slash);
  if (url_encoded(bucket) != bucket) throw UsageError("'{}' is not the name of a bucket; write s3://BUCKET/NAME", printable(bucket));
  return {.method = method, .bucket = std::move(bucket), .key = name.substr(std::min(slash + 1, name.size()))};
}

Request request_for_object(const std::string& method, const std::string& name) {
  auto request = request_for(method, name);
  if (request.key.empty()) throw UsageError("s3://{0} names a bucket and nothing in it; write s3://{0}/NAME", request.bucket);
  return request;
}

/// The CRC-32 of the bytes as the store wants it: in Base64, its highest byte first.
std::string crc32_of(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const uint64_t sum = uint64_t{libdeflate_crc32(0, bytes.data(), bytes.size())} << 4;  // 36 bits: six digits
  std::string text;
  for (int shift = 30; shift >= 0; shift -= 6) text += kDigits[sum >> shift & 63];
  return text + "==";
}

/// An object that comes in one part is put at once, and a larger one as a multipart upload.
class S3Upload : public Upload, NoCopy {
 public:
  S3Upload(Client& client, std::string name) : client_(client), name_(std::move(name)) { (void)request_for_object("PUT", name_); }

  ~S3Upload() override {
    if (id_.empty() || is_complete_) return;
    lanes_.drop_all();  // a part that arrives later would stay in the store
    try {
      auto request = request_for_object("DELETE", name_);
      request.query = "uploadId=" + url_encoded(id_);
      request.attempts = 1;
      client_.send(request);
    } catch (const std::exception& error) {
      log(LogLevel::Warning, "parts of an upload that failed are left in the store: {}", error.what());
    }
  }

  void write(int part, std::span<const std::byte> bytes) override {
    std::string copied(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (id_.empty() && part == 0) {
      whole_ = std::move(copied);
      return;
    }
    if (id_.empty()) begin();
    const auto place = static_cast<size_t>(part);
    if (parts_.size() <= place) parts_.resize(place + 1);
    lanes_.add([this, &to = parts_[place], place, copied = std::move(copied)] {
      auto request = request_for_object("PUT", name_);
      request.query = fmt::format("partNumber={}&uploadId={}", place + 1, url_encoded(id_));
      to = put(std::move(request), copied);
    });
  }

  void complete() override {
    if (id_.empty()) {
      is_verified_ = put(request_for_object("PUT", name_), whole_).is_verified;
      return;
    }
    lanes_.end_all();
    std::string body = "<CompleteMultipartUpload>";
    for (size_t i = 0; i < parts_.size(); i++) {
      body += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag>", i + 1, parts_[i].etag);
      if (!parts_[i].crc32.empty()) body += fmt::format("<ChecksumCRC32>{}</ChecksumCRC32>", parts_[i].crc32);
      body += "</Part>";
    }
    body += "</CompleteMultipartUpload>";
    auto request = request_for_object("POST", name_);
    request.query = "uploadId=" + url_encoded(id_);
    request.body = std::as_bytes(std::span(body));
    request.root = "CompleteMultipartUploadResult";
    const auto answer = client_.send(request);
    // An attempt whose answer was lost may have succeeded, and then the upload is gone.
    if (answer.status == 404 && client_.send(request_for_object("HEAD", name_)).header(kUploadName) != own_name_)
      client_.fail(request, answer);
    is_complete_ = true;
    is_verified_ = std::ranges::all_of(parts_, &Part::is_verified);
  }

  bool is_verified() const override { return is_verified_; }

 private:
  struct Part {
    std::string etag = {}, crc32 = {};
    bool is_verified = false;
  };

  void begin() {
    own_name_ = fmt::format("{:08x}{:08x}", std::random_device()(), std::random_device()());
    auto request = request_for_object("POST", name_);
    request.query = "uploads=";
    request.root = "InitiateMultipartUploadResult";
    request.headers = {fmt::format("{}: {}", kUploadName, own_name_)};
    if (has_checksums_) request.headers.emplace_back("x-amz-checksum-algorithm: CRC32");
    const auto answer = client_.send(request);
    id_ = xml_text(answer.body, "UploadId");
    if (id_.empty()) client_.fail(request, answer);
  }

  Part put(Request request, std::string_view bytes) const {
    request.body = std::as_bytes(std::span(bytes));
    Part part;
    if (has_checksums_) {
      part.crc32 = crc32_of(request.body);
      request.headers.push_back("x-amz-checksum-crc32: " + part.crc32);
    }
    const auto answer = client_.send(request);
    if (answer.status == 404) client_.fail(request, answer);
    part.etag = answer.header("etag");
    // A store that compares says so.
    part.is_verified = has_checksums_ && answer.header("x-amz-checksum-crc32") == part.crc32;
    return part;
  }

  Client& client_;
  const std::string name_;
  const bool has_checksums_ = lower(env("AWS_REQUEST_CHECKSUM_CALCULATION").value_or("")) != "when_required";
  std::string whole_;          // part 0, until there is another one
  std::string id_, own_name_;  // of a multipart upload
  std::deque<Part> parts_;     // which stay where they are while more are added
  Lanes lanes_;
  bool is_complete_ = false, is_verified_ = false;
};

class S3Storage : public Storage {
 public:
  std::optional<uint64_t> size(const std::string& name) override {
    const auto request = request_for("HEAD", name);
    if (request.key.empty()) return std::nullopt;
    const auto answer = client_.send(request);
    if (answer.status == 404) return std::nullopt;
    const auto length = number_of<uint64_t>(answer.header("content-length"));
    if (!length) client_.fail(request, answer);
    return length;
  }

  void read(const std::string& name, uint64_t offset, std::span<std::byte> to) override {
    Lanes lanes;
    for (size_t begin = 0; begin < to.size(); begin += kPieceOfRead) {
      const auto piece = to.subspan(begin, std::min(kPieceOfRead, to.size() - begin));
      const auto act = [this, &name, offset = offset + begin, piece] { read_piece(name, offset, piece); };
      if (to.size() <= kPieceOfRead) return act();
      lanes.add(act);
    }
    lanes.end_all();
  }

  std::unique_ptr<Upload> create(const std::string& name) override { return std::make_unique<S3Upload>(client_, name); }

  std::vector<std::string> list(const std::string& start) override {
    auto request = request_for("GET", start);
    if (request.bucket.size() == start.size()) return {};  // buckets are not listed
    request.root = "ListBucketResult";
    const auto prefix = url_encoded(std::exchange(request.key, ""));
    std::vector<std::string> names;
    for (std::string token, last;; last = token) {
      const auto page = token.empty() ? "" : "continuation-token=" + url_encoded(token) + "&";
      request.query = fmt::format("{}list-type=2&prefix={}", page, prefix);
      const auto answer = client_.send(request);
      if (answer.status == 404) client_.fail(request, answer);
      for (const auto& key : xml_texts(answer.body, "Key")) names.push_back(request.bucket + '/' + key);
      token = xml_text(answer.body, "NextContinuationToken");
      if (xml_text(answer.body, "IsTruncated") != "true") return names;
      if (token.empty() || token == last)
        throw IoError("s3://{}: the store's list has no end; it is not one of S3's second version", start);
    }
  }

  void remove(const std::string& name) override { client_.send(request_for_object("DELETE", name)); }

 private:
  void read_piece(const std::string& name, uint64_t offset, std::span<std::byte> to) {
    auto request = request_for_object("GET", name);
    request.headers = {fmt::format("Range: bytes={}-{}", offset, offset + to.size() - 1)};
    request.to = to;
    const auto answer = client_.send(request);
    if (answer.status == 206) return;
    if (answer.status == 404) client_.fail(request, answer);
    throw IoError("s3://{}: the store gave all of it in place of a part; it does not speak S3", name);
  }

  Client client_;
};

/// Never destroyed, because a thread may use it until the process ends.
const auto& s3_storage = *new std::shared_ptr<Storage>([] {
  auto storage = std::make_shared<S3Storage>();
  use_storage("s3", storage);
  return storage;
}());

}  // namespace
}  // namespace tessera::s3
