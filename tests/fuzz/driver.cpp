// Drives a fuzz target where there is no libFuzzer: it changes seeds at random until the time is up.
//   fuzz_NAME [SECONDS [SEED]]     inputs drawn from the seed; SECONDS 0 runs the seeds alone
//   fuzz_NAME FILE                 one input again, such as the file that was left by a crash
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.h"

namespace {

using Clock = std::chrono::steady_clock;

std::string current;    // the input that is being read
std::string kept_file;  // where it is left if it ends the process
constexpr unsigned kLongestSeconds = 10;

void keep_input(int signal) {
  std::ofstream(kept_file, std::ios::binary) << current;  // not async-signal-safe, but there is nothing to lose
  std::fprintf(stderr, "%s: the input that did it is in the file %s\n", signal == SIGALRM ? "no end" : "crash", kept_file.c_str());
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

class Mutator {
 public:
  Mutator(std::vector<std::string> seeds, uint64_t seed) : seeds_(std::move(seeds)), random_(seed) {}

  std::string draw() {
    auto input = pick(seeds_);
    const auto changes = 1 + below(6);
    for (size_t i = 0; i < changes; i++) change(input);
    constexpr size_t kLongest = 1 << 16;
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  size_t below(size_t bound) { return std::uniform_int_distribution<size_t>(0, bound - 1)(random_); }
  template <class List>
  const typename List::value_type& pick(const List& list) {
    return list[below(std::size(list))];
  }

  void change(std::string& input) {
    if (input.empty()) input = "x";
    const auto place = below(input.size());
    const auto length = 1 + below(std::min<size_t>(input.size() - place, 16));
    switch (below(9)) {
      case 0:
        input[place] = static_cast<char>(input[place] ^ (1 << below(8)));
        break;
      case 1:
        input[place] = static_cast<char>(below(256));
        break;
      case 2:
        input.insert(place, input.substr(place, length));
        break;
      case 3:
        input.erase(place, length);
        break;
      case 4:
        input.resize(place);
        break;
      case 5:
        input.insert(place, pick(kTokens));
        break;
      case 6:
        input.replace(place, length, pick(kTokens));
        break;
      case 7:
        replace_number(input, place);
        break;
      default: {  // the rest of another seed
        const auto& other = pick(seeds_);
        input.resize(place);
        if (!other.empty()) input += other.substr(below(other.size()));
      }
    }
  }

  /// Replaces the next number in the text.
  void replace_number(std::string& input, size_t from) {
    const auto begin = input.find_first_of("0123456789", from);
    if (begin == std::string::npos) return;
    const auto end = std::min(input.find_first_not_of("0123456789", begin), input.size());
    input.replace(begin, end - begin, pick(kNumbers));
  }

  static constexpr std::array<const char*, 14> kNumbers = {"0",
                                                           "1",
                                                           "2",
                                                           "-1",
                                                           "65536",
                                                           "2147483647",
                                                           "4294967296",
                                                           "9223372036854775807",
                                                           "9223372036854775808",
                                                           "18446744073709551615",
                                                           "1e400",
                                                           "0.5",
                                                           "007",
                                                           "99999999999999999999999"};
  static constexpr std::array<const char*, 12> kTokens = {
      "[", "]", "{", "}", ",", "\"", "null", "true", "[[[[[[[[", "\\u0000", "\xff\xff\xff\xff\xff\xff\xff\x7f", ":{\"a\":"};

  std::vector<std::string> seeds_;
  std::mt19937_64 random_;
};

void run(const tessera::fuzz::Target& target, const std::string& input) {
  current = input;
  ::alarm(kLongestSeconds);
  target.read({reinterpret_cast<const uint8_t*>(input.data()), input.size()});
}

}  // namespace

int main(int argc, char** argv) {
  const auto& target = tessera::fuzz::target_called(argv[0]);
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) ::signal(signal, keep_input);
  kept_file = std::filesystem::path(argv[0]).filename().string() + "-input";
  if (argc > 1 && std::filesystem::is_regular_file(argv[1])) {
    std::ifstream file(argv[1], std::ios::binary);
    run(target, {std::istreambuf_iterator<char>(file), {}});
    return 0;
  }
  const double seconds = argc > 1 ? std::atof(argv[1]) : 3;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  const auto seeds = target.seeds();
  for (const auto& input : seeds) run(target, input);
  Mutator mutator(seeds, seed);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  int64_t count = 0;
  std::chrono::duration<double> longest{};
  for (auto now = Clock::now(); now < end; count++) {
    run(target, mutator.draw());
    const auto after = Clock::now();
    longest = std::max<std::chrono::duration<double>>(longest, after - now);
    now = after;
  }
  fmt::print("{} seeds and {} inputs from seed {}; the slowest took {:.1f} ms\n", seeds.size(), count, seed, longest.count() * 1e3);
}
