// Adapters of low rank: LoRA and DoRA, for models whose code knows nothing of them. Names and numbers are those of Python's peft.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/base/no_copy.h"
#include "tessera/nn/layer_choice.h"

namespace tessera::lora {

class LayerAdapters;

enum class Bias {
  None,      // biases stay as they are
  All,       // all biases of the model train,
  LoraOnly,  // or those of layers with adapters
};

/// As peft names them: "lora_only".
std::string_view name_of(Bias bias);
std::optional<Bias> bias_named(std::string_view name);

/// How adapters of linear layers begin: with a random A and a B of 0, or, with Pissa, as the principal part of the weight, which is taken
/// out of it: then the weights must have their values before.
enum class Init { Kaiming, Gaussian, Pissa };

/// Values for layers by patterns that match the end of a layer's name; the first pattern that matches counts.
template <class Value>
using ByPattern = std::vector<std::pair<std::string, Value>>;

inline constexpr int64_t kMostRank = 1'000'000;  // wider than any layer

struct Options {
  int64_t r = 8;            // the rank
  double lora_alpha = 8;    // what an adapter adds is multiplied by lora_alpha / r,
  bool use_rslora = false;  // or by lora_alpha / sqrt(r)
  double lora_dropout = 0;  // of an adapter's input
  bool use_dora = false;    // the size of each row of a weight is trained apart from its direction
  nn::LayerChoice layers = {};                        // that get one: torch::nn::Linear, Embedding and Conv2d can
  ByPattern<int64_t> rank_pattern = {};               // other ranks
  ByPattern<double> alpha_pattern = {};
  std::vector<std::string> modules_to_save = {};  // modules that train as a whole
  Bias bias = Bias::None;
  Init init_lora_weights = Init::Kaiming;
};

/// Gives layers of a model an adapter: torch::nn::Linear, Embedding and Conv2d can have one. Afterwards only adapters train, and what the
/// options name. Call it before fully_shard, or within deferred_init; the base may have its weights before or get them later (then DoRA
/// needs reset_magnitudes). A model may have several adapters, of which the first one is active. Modules and biases that train as a whole
/// have one value for all adapters, so two adapters can't have the same. Throws UsageError, which lists the names of layers, and changes
/// nothing, if a name matches no layer.
void apply(ModuleRef model, const Options& options = {}, const std::string& adapter = "default");

/// The adapters of a model, and those that are active.
std::vector<std::string> adapters(ConstModuleRef model);
std::vector<std::string> active_adapters(ConstModuleRef model);
/// Makes these adapters active. They add up, and train; the others don't.
void set_adapters(ModuleRef model, const std::vector<std::string>& names);

/// Makes the magnitudes of DoRA those of the weights, so that they change nothing: after weights have been loaded. Collective if the model
/// is sharded.
void reset_magnitudes(ModuleRef model, const std::string& adapter = "default");

/// While it exists, the model runs without adapters. Modules and biases that train as a whole keep their trained values. Afterwards each
/// layer's adapters are active that were before, unless others have been chosen meanwhile.
class [[nodiscard]] Disabled : NoCopy {
 public:
  explicit Disabled(ModuleRef model);
  ~Disabled();

 private:
  torch::nn::Module& model_;
  std::vector<std::pair<std::shared_ptr<LayerAdapters>, std::vector<std::string>>> before_;  // which acted in each layer
};

/// Adds active adapters to the weights, which then are those of a model without adapters; they stop acting. Throws UsageError, and changes
/// nothing, where that can't be: quantised weights, convolutions with groups, several adapters of which one is a DoRA. Collective if the
/// model is sharded.
void merge(ModuleRef model);
/// Takes merged adapters out of the weights, but for rounding, and makes them active.
void unmerge(ModuleRef model);

/// The adapters and by what they are multiplied, in words: "default (rank 8, alpha 16)". Empty if there are none.
std::string description(ConstModuleRef model);

/// Throws UsageError if adapters are merged.
void expect_unmerged(ConstModuleRef model);

/// The factor of an adapter's output in this layer.
double scaling_of(const Options& options, const std::string& layer);

/// The parameters of an adapter of one layer.
struct Weights {
  at::Tensor a, b;
  double scaling = 1;
  at::Tensor magnitude = {};  // of DoRA
  bool of_embedding = false;
};
/// A weight with an adapter in it.
at::Tensor merged(const at::Tensor& weight, const Weights& adapter);

/// A layer with an adapter, for files.
struct Layer {
  std::string name;                          // of the layer in the model
  std::map<std::string, std::string> names;  // of its parameters in the model, by their names in files of peft: "lora_A.weight"
  bool has_bias = false;
};
std::vector<Layer> layers_of(ConstModuleRef model, const std::string& adapter = "default");
const Options& options_of(ConstModuleRef model, const std::string& adapter = "default");

}  // namespace tessera::lora
