// Adapters of low rank (LoRA and DoRA) for models whose code does not know of adapters. Names and numbers are those of Python's peft.
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
  All,       // all biases of the model train
  LoraOnly,  // the biases of layers with adapters train
};

/// The name in peft, such as "lora_only".
std::string_view name_of(Bias bias);
std::optional<Bias> bias_named(std::string_view name);

/// The first values of adapters: a random A and a B of 0, or, with Pissa, the principal part of the weight of a linear layer, which is
/// subtracted from the weight. Pissa needs weights that have their values.
enum class Init { Kaiming, Gaussian, Pissa };

/// Values for layers by patterns that match the end of a layer's name; the first pattern that matches counts.
template <class Value>
using ByPattern = std::vector<std::pair<std::string, Value>>;

inline constexpr int64_t kMostRank = 1'000'000;  // wider than any layer

struct Options {
  int64_t r = 8;            // the rank
  double lora_alpha = 8;    // an adapter's output is multiplied by lora_alpha / r
  bool use_rslora = false;  // multiply by lora_alpha / sqrt(r) instead
  double lora_dropout = 0;  // the dropout of an adapter's input
  bool use_dora = false;    // the size of each row of a weight is trained apart from its direction
  nn::LayerChoice layers = {};                        // the layers that get adapters
  ByPattern<int64_t> rank_pattern = {};               // ranks other than r
  ByPattern<double> alpha_pattern = {};
  std::vector<std::string> modules_to_save = {};  // modules that train as a whole
  Bias bias = Bias::None;
  Init init_lora_weights = Init::Kaiming;
};

/// Gives layers of a model an adapter: torch::nn::Linear, Embedding and Conv2d can have one. Afterwards only adapters train, and the
/// modules and biases that the options name. Call it before fully_shard, or within deferred_init. Weights may be loaded before or after
/// this call; if after, DoRA needs reset_magnitudes. A model may have several adapters; the first one is active. Modules and biases that
/// train as a whole have one value for all adapters, so only one adapter can train them. If a name matches no layer, throws UsageError,
/// which lists the names of layers, and changes nothing.
void apply(ModuleRef model, const Options& options = {}, const std::string& adapter = "default");

/// adapters() returns the names of all adapters of a model, and active_adapters() the names of the active adapters.
std::vector<std::string> adapters(ConstModuleRef model);
std::vector<std::string> active_adapters(ConstModuleRef model);
/// Makes these adapters active: their outputs add up, and they train. Other adapters do neither.
void set_adapters(ModuleRef model, const std::vector<std::string>& names);

/// Sets the magnitudes of DoRA to the row norms of the weights with their adapters, so that the magnitudes change nothing at first. Call it
/// after weights have been loaded. Collective if the model is sharded.
void reset_magnitudes(ModuleRef model, const std::string& adapter = "default");

/// Lets the model run without adapters while this object exists. Modules and biases that train as a whole keep their trained values. The
/// destructor makes each layer's earlier adapters active again, unless the program has chosen others meanwhile.
class [[nodiscard]] Disabled : NoCopy {
 public:
  explicit Disabled(ModuleRef model);
  ~Disabled();

 private:
  torch::nn::Module& model_;
  std::vector<std::pair<std::shared_ptr<LayerAdapters>, std::vector<std::string>>> before_;  // the adapters that were active in each layer
};

/// Adds active adapters to the weights, and makes them inactive: the model computes the same without them. Throws UsageError, and changes
/// nothing, for quantised weights, convolutions with groups, and several active adapters of which one is a DoRA. Collective if the model is
/// sharded.
void merge(ModuleRef model);
/// Subtracts merged adapters from the weights, which then equal the weights before merge() except for rounding, and makes the adapters
/// active.
void unmerge(ModuleRef model);

/// A description of all adapters with their ranks and factors: "default (rank 8, alpha 16)". Empty if there are none.
std::string description(ConstModuleRef model);

/// Throws UsageError if adapters are merged.
void expect_unmerged(ConstModuleRef model);

/// The rank of an adapter in this layer, and the factor of its output.
int64_t rank_of(const Options& options, const std::string& layer);
double scaling_of(const Options& options, const std::string& layer);

/// The parameters of an adapter of one layer.
struct Weights {
  at::Tensor a, b;
  double scaling = 1;
  at::Tensor magnitude = {};  // DoRA's magnitudes; undefined without DoRA
  bool of_embedding = false;
};
/// The weight with the adapter merged into it.
at::Tensor merged(const at::Tensor& weight, const Weights& adapter);

/// A layer with an adapter, and the names that files need.
struct Layer {
  std::string name;                          // the name of the layer in the model
  std::map<std::string, std::string> names;  // from names in files of peft ("lora_A.weight") to names of parameters in the model
  bool has_bias = false;
};
std::vector<Layer> layers_of(ConstModuleRef model, const std::string& adapter = "default");
const Options& options_of(ConstModuleRef model, const std::string& adapter = "default");

}  // namespace tessera::lora
