// Where an object store is and whose requests it takes, found as the tools of AWS find it.
#pragma once

#include <ctime>
#include <map>
#include <string>
#include <string_view>

#include "tessera/s3/http.h"

namespace tessera::s3 {

/// The sections of a file such as ~/.aws/config, each with its keys. Lines that are none are skipped.
using Sections = std::map<std::string, std::map<std::string, std::string>>;
Sections parse_sections(std::string_view text);

struct Settings {
  std::string region = "us-east-1";
  std::string endpoint = {};  // empty: Amazon's, by the region
};
Settings find_settings();

struct FoundCredentials {
  Credentials credentials;
  std::time_t until = 0;  // when they have to be found again; 0: never
};

/// Looks in the variables, in a file with a web identity, in the files of the profile, and at the metadata services of containers and of
/// EC2. Throws ConfigError if there are none.
FoundCredentials find_credentials(const Settings& settings);

}  // namespace tessera::s3
