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
  ImageNetwork network;
  std::function<std::shared_ptr<ImageModel>(const ImageModelOptions&)> make;
  std::vector<std::pair<std::string, std::string>> renames;
};

template <class Model, class Options>
KnownModel known(const std::string& name, const Options& shape, ImageNetwork network) {
  KnownModel row{.name = name, .network = network, .make = {}, .renames = {}};
  if constexpr (requires { shape.patch; }) row.network.smallest = shape.patch;
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
  const ImageNetwork vgg{"Linear", "classifier.6", 32}, densenet{"DenseLayer", "classifier", 29};
  const ImageNetwork basic{"BasicBlock", "fc"}, bottleneck{"Bottleneck", "fc"}, vit{"VitBlock", "head"};
  static const std::vector<KnownModel> all = {
      known<AlexNet>("alexnet", AlexNetOptions{}, {"Linear", "classifier.6", 63}),
      known<DenseNet>("densenet121", DenseNetOptions::of_121(), densenet),
      known<DenseNet>("densenet161", DenseNetOptions::of_161(), densenet),
      known<DenseNet>("densenet169", DenseNetOptions::of_169(), densenet),
      known<DenseNet>("densenet201", DenseNetOptions::of_201(), densenet),
      known<Inception>("inception_v3", InceptionOptions{}, {"InceptionBlock", "fc", 75, 299}),
      known<ResNet>("resnet18", ResNetOptions::resnet18(), basic),
      known<ResNet>("resnet34", ResNetOptions::resnet34(), basic),
      known<ResNet>("resnet50", ResNetOptions::resnet50(), bottleneck),
      known<ResNet>("resnet101", ResNetOptions::resnet101(), bottleneck),
      known<ResNet>("resnet152", ResNetOptions::resnet152(), bottleneck),
      known<SqueezeNet>("squeezenet1_0", SqueezeNetOptions::squeezenet1_0(), {"Fire", "classifier.1", 21}),
      known<SqueezeNet>("squeezenet1_1", SqueezeNetOptions::squeezenet1_1(), {"Fire", "classifier.1", 17}),
      known<Vgg>("vgg11", VggOptions::vgg11(), vgg),
      known<Vgg>("vgg11_bn", VggOptions::vgg11(true), vgg),
      known<Vgg>("vgg13", VggOptions::vgg13(), vgg),
      known<Vgg>("vgg13_bn", VggOptions::vgg13(true), vgg),
      known<Vgg>("vgg16", VggOptions::vgg16(), vgg),
      known<Vgg>("vgg16_bn", VggOptions::vgg16(true), vgg),
      known<Vgg>("vgg19", VggOptions::vgg19(), vgg),
      known<Vgg>("vgg19_bn", VggOptions::vgg19(true), vgg),
      known<Vit>("vit_b_16", VitOptions::base(), vit),
      known<Vit>("vit_tiny_patch16_224", VitOptions::tiny(), vit),
      known<Vit>("vit_small_patch16_224", VitOptions::small(), vit),
      known<Vit>("vit_base_patch16_224", VitOptions::base(), vit),
      known<Vit>("vit_large_patch16_224", VitOptions::large(), vit),
      known<Vit>("vit_huge_patch14_224", VitOptions::huge(), vit),
      known<Vit>("vit_giant_patch14_224", VitOptions::giant(), vit),
      known<Vit>("vit_10b", VitOptions::of_10b(), vit),
      known<Vit>("vit_60b", VitOptions::of_60b(), vit),
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
  const auto smallest = known.network.smallest;
  if (options.image < smallest) {
    throw UsageError("{0} takes images of at least {1} by {1}, and not of {2} by {2}; give it larger ones", name, smallest, options.image);
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

const ImageNetwork& image_network(const std::string& name) {
  return find_model(name).network;
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
