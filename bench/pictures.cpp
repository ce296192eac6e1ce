// Decodes and augments the pictures of a folder as one trains with them, and prints how many in a second as one line of JSON.
// bench/pictures runs it, and measures the same with torchvision.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <tessera/vision.h>

#include <CLI/CLI.hpp>
#include <string>

#include "bench.h"

namespace {

using namespace tessera;

struct Flags {
  std::string folder;
  int workers = 2;
  int64_t batch = 32, warmup = 13, batches = 26;
  bool augment = false, may_shrink = false;
};

double pictures_per_second(const Flags& flags) {
  const auto images = vision::read_image_folder(flags.folder);
  vision::TrainTransform transform{.may_shrink = flags.may_shrink};
  if (flags.augment) transform.augment.emplace();
  data::Loader loader(data::Sampler({.size = images.size(), .global_batch = flags.batch, .tail = data::Tail::Fill}),
                      vision::fetch_images(images, transform), {.workers = flags.workers});
  // One epoch follows the other, so that workers are busy as long as the clock runs: what they had fetched when it began makes up for what
  // they have fetched when it ends.
  const auto take = [&](int64_t count) {
    while (count > 0) count -= loader.next() ? 1 : 0;
  };
  take(flags.warmup);
  return static_cast<double>(flags.batches * flags.batch) / bench::seconds_of([&] { take(flags.batches); });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Decodes and augments pictures, and prints how many in a second.", "bench_pictures");
  Flags flags;
  app.add_option("folder", flags.folder, "With a folder of pictures for each class")->required();
  app.add_option("--workers", flags.workers)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--batch", flags.batch)->check(CLI::Range(1, 1'000'000))->capture_default_str();
  app.add_option("--warmup", flags.warmup, "Batches before the clock begins")->check(CLI::Range(0, 1'000'000))->capture_default_str();
  app.add_option("--batches", flags.batches, "That are timed")->check(CLI::Range(1, 1'000'000))->capture_default_str();
  app.add_flag("--rand-augment", flags.augment);
  app.add_flag("--may-shrink", flags.may_shrink, "JPEGs may be decoded at a part of their size");
  return bench::run(app, argc, argv, [&] { fmt::print("{{\"pictures_per_second\": {}}}\n", pictures_per_second(flags)); });
}
