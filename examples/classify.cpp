// Answers with the class of each picture that it is told by name: ls *.jpg | classify resnet18 weights.pth pictures/train 224
#include <tessera/base/input_file.h>
#include <tessera/base/words.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <tessera/vision.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>

using namespace tessera;

/// Returns the exit status: 1 if a picture could not be read.
int classify(const std::string& name, const std::string& weights, const std::string& folder, int64_t size) {
  const auto classes = vision::read_image_folder(folder).classes;
  const auto model = models::make_image_model(name, {.classes = std::ssize(classes), .image = size});
  try {
    checkpoint::load_weights(
        model, weights,
        {.may_be_missing = {".*\\.num_batches_tracked"}, .may_be_unknown = {"AuxLogits\\..*"}, .renamed = models::renames_of(name)});
  } catch (const UsageError& error) {
    throw UsageError("{}; MODEL and the {} classes in {} must be those it was trained with", error.what(), classes.size(), folder);
  }
  model->eval();

  const torch::NoGradGuard no_grad;
  const auto scale = models::pixel_scale_of(name);
  const vision::TestTransform transform{.shorter_side = vision::usual_shorter_side(size),
                                        .size = size,
                                        .normalize = {.mean = scale.mean, .deviation = scale.deviation}};  // as the recipe tests
  int status = 0;
  for (std::string path; std::getline(std::cin, path);) {
    try {
      const auto images = torch::empty({1, 3, size, size});
      vision::apply(transform, InputFile(path).read_all(), path, images[0]);
      const auto [shares, labels] = model->forward(images).softmax(1).max(1);
      std::printf("%s: %s (%.0f %%)\n", path.c_str(), classes.at(labels.item<int64_t>()).c_str(), 100 * shares.item<double>());
    } catch (const IoError& error) {
      std::printf("%s\n", error.what());
      status = 1;
    }
    std::fflush(stdout);
  }
  return status;
}

int main(int argc, char** argv) try {
  const auto size = argc == 5 ? number_of<int64_t>(argv[4]).value_or(0) : 0;
  if (size > 0) return classify(argv[1], argv[2], argv[3], size);
  std::fputs(
      "classify MODEL WEIGHTS FOLDER SIZE, where FOLDER has a folder for each class, and SIZE is the height and width to which\n"
      "pictures are cut, such as 224; then names of pictures, one a line\n",
      stderr);
  return 2;
} catch (const Error& error) {
  std::fprintf(stderr, "classify: %s\n", error.what());
  return 1;
}
