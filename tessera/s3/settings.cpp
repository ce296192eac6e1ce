#include "tessera/s3/settings.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/s3/xml.h"

namespace tessera::s3 {
namespace {

namespace fs = std::filesystem;

constexpr std::time_t kRenewBefore = 300;  // seconds

std::string_view trimmed(std::string_view text) {
  const auto begin = std::min(text.find_first_not_of(" \t\r"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

/// The sections of a file that need not be there.
Sections sections_of(const char* variable, const char* name) {
  const auto home = env("HOME");
  const auto path = fs::path(env(variable).value_or(home ? fs::path(*home) / ".aws" / name : fs::path()));
  std::error_code none;
  if (path.empty() || !fs::is_regular_file(path, none)) return {};  // /dev/null is none
  return parse_sections(InputFile(path).read_all());
}

std::string profile_name() {
  return env("AWS_PROFILE").value_or(env("AWS_DEFAULT_PROFILE").value_or("default"));
}

/// The keys of the profile in ~/.aws/config, where sections other than "default" are called "profile NAME".
std::map<std::string, std::string> profile_in_config() {
  auto sections = sections_of("AWS_CONFIG_FILE", "config");
  const auto name = profile_name();
  return sections[name == "default" && sections.contains(name) ? name : "profile " + name];
}

std::string value_of(const std::map<std::string, std::string>& keys, const char* key) {
  const auto found = keys.find(key);
  return found == keys.end() ? "" : found->second;
}

/// When credentials have to be renewed that last until a time such as "2026-05-01T12:00:00Z".
std::time_t renewal(const std::string& expiration) {
  std::tm time = {};
  if (::strptime(expiration.c_str(), "%Y-%m-%dT%H:%M:%S", &time) == nullptr) return 0;
  return std::max<std::time_t>(::timegm(&time) - kRenewBefore, 1);
}

std::string text_in(const std::string& file) {
  const auto text = InputFile(file).read_all();
  return std::string(trimmed(text.substr(0, text.find('\n'))));
}

/// Asks a service, again where it is busy: all ranks of a job ask at once.
HttpAnswer asked(const HttpRequest& request) {
  auto answer = exchange(request);
  for (int i = 0; i < 3 && (answer.status == 429 || answer.status >= 500); i++) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    answer = exchange(request);
  }
  return answer;
}

/// Asks a service for credentials.
std::string fetched(const HttpRequest& request, const std::string& source) {
  const auto answer = asked(request);
  if (answer.status == 200) return answer.body;
  throw ConfigError("{} gave no credentials: {}", source,
                    answer.failure.empty() ? fmt::format("status {}", answer.status) : answer.failure);
}

FoundCredentials from_json(const std::string& text, const std::string& source) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto value = [&](const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return json.is_object() && found != json.end() && found->is_string() ? found->get<std::string>() : "";
  };
  const Credentials credentials{.id = value("AccessKeyId"), .secret = value("SecretAccessKey"), .token = value("Token"), .source = source};
  FoundCredentials found{.credentials = credentials, .until = renewal(value("Expiration"))};
  if (found.credentials.id.empty() || found.credentials.secret.empty()) throw ConfigError("{} answered without credentials", source);
  return found;
}

std::optional<FoundCredentials> from_variables() {
  const auto id = env("AWS_ACCESS_KEY_ID"), secret = env("AWS_SECRET_ACCESS_KEY");
  if (!id && !secret) return std::nullopt;
  if (!id || !secret)
    throw ConfigError("{} is set without {}; set both, or none", id ? "AWS_ACCESS_KEY_ID" : "AWS_SECRET_ACCESS_KEY",
                      id ? "AWS_SECRET_ACCESS_KEY" : "AWS_ACCESS_KEY_ID");
  const auto token = env("AWS_SESSION_TOKEN").value_or("");
  return FoundCredentials{.credentials = {.id = *id, .secret = *secret, .token = token, .source = "AWS_ACCESS_KEY_ID"}};
}

std::optional<FoundCredentials> from_web_identity(const Settings& settings) {
  const auto file = env("AWS_WEB_IDENTITY_TOKEN_FILE"), role = env("AWS_ROLE_ARN");
  if (!file || !role) return std::nullopt;
  const auto body =
      fmt::format("Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn={}&RoleSessionName={}&WebIdentityToken={}",
                  url_encoded(*role), url_encoded(env("AWS_ROLE_SESSION_NAME").value_or("tessera")), url_encoded(text_in(*file)));
  const auto domain = fmt::format("sts.{}.amazonaws.com{}", settings.region, settings.region.starts_with("cn-") ? ".cn" : "");
  const auto url = env("AWS_ENDPOINT_URL_STS").value_or("https://" + domain) + "/";
  const auto source = "the role of AWS_ROLE_ARN";
  const auto xml = fetched({.method = "POST", .url = url, .body = std::as_bytes(std::span(body))}, source);
  FoundCredentials found{.credentials = {.id = xml_text(xml, "AccessKeyId"),
                                         .secret = xml_text(xml, "SecretAccessKey"),
                                         .token = xml_text(xml, "SessionToken"),
                                         .source = source},
                         .until = renewal(xml_text(xml, "Expiration"))};
  if (found.credentials.secret.empty()) throw ConfigError("{} got an answer without credentials from {}", source, url);
  return found;
}

std::optional<FoundCredentials> from_files() {
  const auto profile = profile_name();
  const auto take = [&](const std::map<std::string, std::string>& keys, const char* file) -> std::optional<FoundCredentials> {
    const auto id = value_of(keys, "aws_access_key_id"), secret = value_of(keys, "aws_secret_access_key");
    if (id.empty() || secret.empty()) return std::nullopt;
    return FoundCredentials{.credentials = {.id = id,
                                            .secret = secret,
                                            .token = value_of(keys, "aws_session_token"),
                                            .source = fmt::format("the profile '{}' in {}", printable(profile), file)}};
  };
  auto found = take(sections_of("AWS_SHARED_CREDENTIALS_FILE", "credentials")[profile], "~/.aws/credentials");
  return found ? found : take(profile_in_config(), "~/.aws/config");
}

std::optional<FoundCredentials> from_container() {
  const auto relative = env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"), full = env("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (!relative && !full) return std::nullopt;
  HttpRequest request{.url = relative ? "http://169.254.170.2" + *relative : *full};
  const auto file = env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
  if (const auto token = file ? text_in(*file) : env("AWS_CONTAINER_AUTHORIZATION_TOKEN").value_or(""); !token.empty())
    request.headers.push_back("Authorization: " + token);
  const auto source = "the service of AWS_CONTAINER_CREDENTIALS_" + std::string(relative ? "RELATIVE_URI" : "FULL_URI");
  return from_json(fetched(request, source), source);
}

std::optional<FoundCredentials> from_instance() {
  if (lower(env("AWS_EC2_METADATA_DISABLED").value_or("")) == "true") return std::nullopt;
  const auto at = env("AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or("http://169.254.169.254") + "/latest/";
  const auto token = asked(
      {.method = "PUT", .url = at + "api/token", .headers = {"X-aws-ec2-metadata-token-ttl-seconds: 21600"}, .connect_seconds = 1});
  if (token.status != 200) return std::nullopt;  // not on EC2
  const std::vector<std::string> headers = {"X-aws-ec2-metadata-token: " + token.body};
  const auto source = "the role of this EC2 instance", roles = "meta-data/iam/security-credentials/";
  const auto role = fetched({.url = at + roles, .headers = headers}, source);
  return from_json(fetched({.url = at + roles + role.substr(0, role.find('\n')), .headers = headers}, source), source);
}

}  // namespace

Sections parse_sections(std::string_view text) {
  Sections sections;
  std::map<std::string, std::string>* section = nullptr;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    const auto line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    if (line.front() == '[') {
      const auto words = words_in(std::string(line.substr(1, line.find(']') - 1)));
      section = &sections[words.size() == 2 ? words[0] + " " + words[1] : words.size() == 1 ? words[0] : ""];
    } else if (const auto equals = line.find('='); section != nullptr && equals != std::string_view::npos && line.front() != ' ') {
      (*section)[std::string(trimmed(line.substr(0, equals)))] = trimmed(line.substr(equals + 1));
    }
  }
  return sections;
}

Settings find_settings() {
  const auto profile = profile_in_config();
  const auto first = [](std::initializer_list<std::optional<std::string>> values) {
    for (const auto& value : values) {
      if (value && !value->empty()) return *value;
    }
    return std::string();
  };
  Settings settings{.region = first({env("AWS_REGION"), env("AWS_DEFAULT_REGION"), value_of(profile, "region"), "us-east-1"}),
                    .endpoint = first({env("AWS_ENDPOINT_URL_S3"), env("AWS_ENDPOINT_URL"), value_of(profile, "endpoint_url")})};
  while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
  if (settings.endpoint.find('@') != std::string::npos)  // not printed: a password is perhaps before it
    throw ConfigError("the endpoint of the object store has an '@'; put a user in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not there");
  if (!settings.endpoint.empty() && !settings.endpoint.starts_with("http://") && !settings.endpoint.starts_with("https://"))
    throw ConfigError("the endpoint of the object store is '{}'; it begins with https:// or http://", printable(settings.endpoint));
  return settings;
}

FoundCredentials find_credentials(const Settings& settings) {
  if (auto found = from_variables()) return *found;
  if (auto found = from_web_identity(settings)) return *found;
  if (auto found = from_files()) return *found;
  if (auto found = from_container()) return *found;
  if (auto found = from_instance()) return *found;
  throw ConfigError(
      "there are no credentials for s3://: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write the profile '{}' into "
      "~/.aws/credentials; `aws configure export-credentials --format env` prints those that only the AWS CLI finds, such as SSO's",
      printable(profile_name()));
}

}  // namespace tessera::s3
