#include "tessera/models/image_model.h"

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/models/alexnet.h"
#include "tessera/models/densenet.h"
#include "tessera/models/inception.h"
#include "tessera/models/resnet.h"
#include "tessera/models/squeezenet.h"
#include "tessera/models/vgg.h"
#include "tessera/models/vit.h"

namespace tessera::models {
namespace {

struct KnownModel {
  std::string name;
  std::function<std::shared_ptr<ImageModel>(const ImageModelOptions&)> make;
  std::vector<std::pair<std::string, std::string>> renames;
  int64_t smallest = 1, image = 224;  // height and width
};

template <class Model, class Options>
KnownModel known(const std::string& name, const Options& shape, int64_t smallest = 1, int64_t image = 224) {
  KnownModel row{.name = name, .make = {}, .renames = {}, .smallest = smallest, .image = image};
  if constexpr (requires { shape.patch; }) row.smallest = shape.patch;
  if constexpr (requires { Model::Impl::renames(); }) row.renames = Model::Impl::renames();
  row.make = [name, shape](const ImageModelOptions& given) -> std::shared_ptr<ImageModel> {
    auto options = shape;
    options.classes = given.classes;
    if constexpr (requires { options.image; }) options.image = given.image;
    if constexpr (requires { options.dropout; }) {
      options.dropout = given.dropout.value_or(options.dropout);
    } else if (given.dropout.value_or(0) != 0) {
      throw UsageError("{} has no dropout: leave ImageModelOptions::dropout unset", name);
    }
    return Model(options).ptr();
  };
  return row;
}

const std::vector<KnownModel>& known_models() {
  static const std::vector<KnownModel> all = {
      known<AlexNet>("alexnet", AlexNetOptions{}, 63),
      known<DenseNet>("densenet121", DenseNetOptions::of_121(), 29),
      known<DenseNet>("densenet161", DenseNetOptions::of_161(), 29),
      known<DenseNet>("densenet169", DenseNetOptions::of_169(), 29),
      known<DenseNet>("densenet201", DenseNetOptions::of_201(), 29),
      known<Inception>("inception_v3", InceptionOptions{}, 75, 299),
      known<ResNet>("resnet18", ResNetOptions::resnet18()),
      known<ResNet>("resnet34", ResNetOptions::resnet34()),
      known<ResNet>("resnet50", ResNetOptions::resnet50()),
      known<ResNet>("resnet101", ResNetOptions::resnet101()),
      known<ResNet>("resnet152", ResNetOptions::resnet152()),
      known<SqueezeNet>("squeezenet1_0", SqueezeNetOptions::squeezenet1_0(), 21),
      known<SqueezeNet>("squeezenet1_1", SqueezeNetOptions::squeezenet1_1(), 17),
      known<Vgg>("vgg11", VggOptions::vgg11(), 32),
      known<Vgg>("vgg11_bn", VggOptions::vgg11(true), 32),
      known<Vgg>("vgg13", VggOptions::vgg13(), 32),
      known<Vgg>("vgg13_bn", VggOptions::vgg13(true), 32),
      known<Vgg>("vgg16", VggOptions::vgg16(), 32),
      known<Vgg>("vgg16_bn", VggOptions::vgg16(true), 32),
      known<Vgg>("vgg19", VggOptions::vgg19(), 32),
      known<Vgg>("vgg19_bn", VggOptions::vgg19(true), 32),
      known<Vit>("vit_b_16", VitOptions::base()),
      known<Vit>("vit_tiny_patch16_224", VitOptions::tiny()),
      known<Vit>("vit_small_patch16_224", VitOptions::small()),
      known<Vit>("vit_base_patch16_224", VitOptions::base()),
      known<Vit>("vit_large_patch16_224", VitOptions::large()),
      known<Vit>("vit_huge_patch14_224", VitOptions::huge()),
      known<Vit>("vit_giant_patch14_224", VitOptions::giant()),
      known<Vit>("vit_10b", VitOptions::of_10b()),
      known<Vit>("vit_60b", VitOptions::of_60b()),
  };
  return all;
}

const KnownModel& find_model(const std::string& name) {
  const auto found = std::ranges::find(known_models(), name, &KnownModel::name);
  if (found != known_models().end()) return *found;
  const auto nearest = nearest_name(name, image_model_names());
  throw UsageError("there is no network '{}'{}; there are {}", printable(name),
                   nearest.empty() ? std::string() : " (did you mean " + nearest + "?)", joined(image_model_names()));
}

}  // namespace

std::shared_ptr<ImageModel> make_image_model(const std::string& name, const ImageModelOptions& options) {
  const auto& known = find_model(name);
  if (options.image < known.smallest) {
    throw UsageError("{0} takes images of at least {1} by {1}, and not of {2} by {2}; give it larger ones", name, known.smallest,
                     options.image);
  }
  return known.make(options);
}

const std::vector<std::string>& image_model_names() {
  static const auto names = [] {
    std::vector<std::string> all;
    for (const auto& row : known_models()) all.push_back(row.name);
    return all;
  }();
  return names;
}

int64_t image_of(const std::string& name) {
  return find_model(name).image;
}

int64_t smallest_image_of(const std::string& name) {
  return find_model(name).smallest;
}

PixelScale pixel_scale_of(const std::string& name) {
  const bool is_even = find_model(name).name == "inception_v3" || (name.starts_with("vit_") && name != "vit_b_16");
  if (is_even) return {.mean = {0.5, 0.5, 0.5}, .deviation = {0.5, 0.5, 0.5}};
  return {.mean = {0.485, 0.456, 0.406}, .deviation = {0.229, 0.224, 0.225}};
}

std::vector<std::pair<std::string, std::string>> renames_of(const std::string& name) {
  return find_model(name).renames;
}

}  // namespace tessera::models
