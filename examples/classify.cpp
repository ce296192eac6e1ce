// Answers with the class of each picture that it is told by name: ls *.jpg | classify resnet18 weights.pth pictures/train 224
#include <tessera/base/input_file.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <tessera/vision.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("classify MODEL WEIGHTS FOLDER SIZE, where FOLDER has a folder for each class; then names of pictures, one a line\n",
               stderr);
    return 2;
  }
  const std::string name = argv[1];
  const auto classes = vision::read_image_folder(argv[3]).classes;
  const int64_t size = std::stoll(argv[4]);
  const auto model = models::make_image_model(name, {.classes = std::ssize(classes), .image = size});
  checkpoint::load_weights(
      model, argv[2],
      {.may_be_missing = {".*\\.num_batches_tracked"}, .may_be_unknown = {"AuxLogits\\..*"}, .renamed = models::renames_of(name)});
  model->eval();

  const torch::NoGradGuard no_grad;
  const auto scale = models::pixel_scale_of(name);
  const vision::TestTransform transform{.shorter_side = (size * 8 + 3) / 7,
                                        .size = size,
                                        .normalize = {.mean = scale.mean, .deviation = scale.deviation}};  // as the recipe tests
  for (std::string path; std::getline(std::cin, path);) {
    try {
      const auto images = torch::empty({1, 3, size, size});
      vision::apply(transform, InputFile(path).read_all(), path, images[0]);
      const auto [shares, labels] = model->forward(images).softmax(1).max(1);
      std::printf("%s: %s (%.0f %%)\n", path.c_str(), classes.at(labels.item<int64_t>()).c_str(), 100 * shares.item<double>());
    } catch (const IoError& error) {
      std::printf("%s\n", error.what());
    }
    std::fflush(stdout);
  }
}
