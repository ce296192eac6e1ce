// How models come to their parameters: kinds of modules and containers, parameters of every form and layout, ways of building.
#include <sstream>

#include "idiom.h"

namespace tessera::idioms::construction {
namespace {

namespace nn = torch::nn;
using Forward = std::function<at::Tensor(const at::Tensor& x)>;
enum class Units { One, Nested };

void train(Run& run, nn::Module& model, const std::vector<int64_t>& sizes, const Forward& forward, Units units = Units::One) {
  fill(model);
  units == Units::One ? run.shard(model) : run.shard_nested(model);
  run.train(model, [&](int step) { return forward(run.batch(sizes, step)).pow(2).mean(); }, run.adamw(model));
}

/// Trains with torch's optimizer always: for parameters that are not dense, or not of float32, in the plain run.
void train_with_torch(Run& run, nn::Module& model, const std::vector<int64_t>& sizes, const Forward& forward) {
  fill(model);
  run.shard(model);
  const Steps sgd(std::make_unique<torch::optim::SGD>(run.parameters(model), torch::optim::SGDOptions(0.1).momentum(0.5)));
  run.train(model, [&](int step) { return forward(run.batch(sizes, step)).pow(2).mean(); }, sgd);
}

/// One parameter, made by the idiom.
struct One : nn::Module {
  at::Tensor w;
  explicit One(const at::Tensor& tensor) { w = register_parameter("w", tensor); }
};

/// Two parameters, made by the idiom.
struct Two : nn::Module {
  at::Tensor a, b;
  Two(const at::Tensor& first, const at::Tensor& second) {
    a = register_parameter("a", first);
    b = register_parameter("b", second);
  }
};

/// A layer and what else the idiom registers.
struct WithHead : nn::Module {
  nn::Linear head{nullptr};
  WithHead(int64_t in, int64_t out) { head = register_module("head", nn::Linear(in, out)); }
};

/// Indices below `count`, other ones on every rank and in every step.
at::Tensor indices(const at::Tensor& x, int64_t count) {
  return (x.abs() * (static_cast<double>(count) - 0.01)).to(torch::kLong);
}

/// A layer, and a second one that joins the model, or takes the layer's place, after sharding.
struct Growing : WithHead {
  nn::Linear late{nullptr};
  at::Tensor scale;
  Growing() : WithHead(5, 5) { fill(*this); }
  void grow() {
    late = register_module("late", nn::Linear(5, 3));
    fill(*late);
  }
  void grow_in_place() {
    head = replace_module("head", nn::Linear(5, 5));
    fill(*head);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = head(scale.defined() ? x * scale : x);
    return late ? late(y) : y;
  }
};

/// The model changes after sharding, and then trains, with an optimizer that was made before or after the change.
enum class Made { Before, After };
void train_grown(Run& run, const std::function<void(Growing&)>& change, Made optimizer) {
  const auto model = std::make_shared<Growing>();
  run.shard_nested(model);
  std::optional<Steps> steps;
  if (optimizer == Made::Before) steps = run.adamw(*model);
  change(*model);
  if (optimizer == Made::After) steps = run.adamw(*model);
  run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, *steps);
}

at::Tensor overlapping() {
  return values({6}).as_strided({5, 2}, {1, 1});
}

}  // namespace

Chapter chapter() {
  return {.title = "Construction and registration", .idioms = {
    // --- Forms of parameters ---
    {.what = "a parameter that was a transposed view when it was registered", .act = [](Run& run) {
       One model(values({5, 6}).t());
       train(run, model, {3, 6}, [&](auto& x) { return x.mm(model.w); });
     }},
    {.what = "a parameter that is a permuted view with three dimensions", .act = [](Run& run) {
       One model(values({2, 3, 5}).permute({2, 0, 1}));
       train(run, model, {5, 2, 3}, [&](auto& x) { return x * model.w + model.w.pow(2); });
     }},
    {.what = "a parameter made by `unsqueeze`", .act = [](Run& run) {
       One model(values({5}).unsqueeze(1));
       train(run, model, {3, 5}, [&](auto& x) { return x.mm(model.w); });
     }},
    {.what = "a parameter that is one row of a larger tensor, `x[1]`", .act = [](Run& run) {
       One model(values({3, 5})[1]);
       train(run, model, {4, 5}, [&](auto& x) { return x * model.w; });
     }},
    {.what = "parameters that are the chunks of one tensor", .act = [](Run& run) {
       const auto chunks = values({6, 5}).chunk(2);
       Two model(chunks[0], chunks[1]);
       train(run, model, {4, 5}, [&](auto& x) { return x.mm(model.a.t()) * x.mm(model.b.t()); });
     }},
    {.what = "a parameter that is every second value of a tensor", .act = [](Run& run) {
       One model(values({10}).slice(0, 0, 10, 2));
       train_with_torch(run, model, {4, 5}, [&](auto& x) { return x * model.w; });
     }},
    {.what = "a parameter that is some columns of a matrix", .act = [](Run& run) {
       One model(values({5, 8}).narrow(1, 2, 3));
       train_with_torch(run, model, {4, 5}, [&](auto& x) { return x.mm(model.w); });
     }},
    {.what = "two parameters that share one buffer, even and odd values", .act = [](Run& run) {
       const auto buffer = values({10});
       Two model(buffer.slice(0, 0, 10, 2), buffer.slice(0, 1, 10, 2));
       train_with_torch(run, model, {4, 5}, [&](auto& x) { return x * model.a + model.b; });
     }},
    {.what = "a parameter of which every rank keeps a whole copy, `.replicated = {scale}`", .act = [](Run& run) {
       WithHead model(5, 3);
       const auto scale = model.register_parameter("scale", values({3}));
       fill(model);
       run.shard(model, {.mesh = run.world(), .replicated = {scale}});
       run.train(model, [&](int step) { return (model.head(run.batch({4, 5}, step)) * scale).pow(2).mean(); }, run.adamw(model));
     }},
    {.what = "a parameter divided along another dimension, `.shard_dim`", .act = [](Run& run) {
       WithHead model(5, 3);
       fill(model);
       const auto last = [](const std::string&, const at::Tensor&) { return std::optional<int64_t>(-1); };
       run.shard(model, {.mesh = run.world(), .layout = Layout::Rows, .shard_dim = last});
       run.train(model, [&](int step) { return model.head(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(model));
     }, .within = 1e-5, .because = "a matrix product may add in another order if a matrix lies in memory in another"},
    {.what = "a tensor named in `.ignored` that is no parameter of the module", .act = [](Run& run) {
       WithHead model(5, 3);
       run.shard(model, {.mesh = run.world(), .ignored = {model.head->weight.detach()}});
     }, .refused = "is no parameter of"},
    {.what = "two parameters that are the halves of the columns of one matrix", .act = [](Run& run) {
       const auto halves = values({5, 6}).chunk(2, 1);
       Two model(halves[0], halves[1]);
       train_with_torch(run, model, {4, 5}, [&](auto& x) { return x.mm(model.a) * x.mm(model.b); });
     }},
    {.what = "an expanded parameter", .act = [](Run& run) {
       One model(torch::ones({1, 4}).expand({3, 4}));
       run.shard(model);
     }, .refused = "overlaps itself"},
    {.what = "a parameter whose rows overlap (`as_strided`)", .act = [](Run& run) {
       One model(overlapping());
       run.shard(model);
     }, .refused = "overlaps itself"},
    {.what = "a parameter without dimensions, beside others", .act = [](Run& run) {
       Two model(values({}, 1), values({7}));
       train(run, model, {4, 7}, [&](auto& x) { return (x + model.b) * model.a; });
     }},
    {.what = "a unit that is a single scalar", .act = [](Run& run) {
       One model(values({}, 1));
       train(run, model, {4}, [&](auto& x) { return x * model.w.exp(); });
     }},
    {.what = "an empty parameter, beside others", .act = [](Run& run) {
       Two model(values({0, 3}), values({5}));
       train(run, model, {4, 5}, [&](auto& x) { return x * model.b + model.a.sum(); });
     }},
    {.what = "a parameter of one value, fewer than there are ranks", .act = [](Run& run) {
       Two model(values({1}, 1), values({1, 1}, 2));
       train(run, model, {4, 1}, [&](auto& x) { return x.mm(model.b) + model.a; });
     }},
    {.what = "a weight in channels-last order", .act = [](Run& run) {
       nn::Conv2d conv(nn::Conv2dOptions(3, 5, 2));
       conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
       train(run, *conv, {2, 3, 4, 4}, [&](auto& x) { return conv(x); });
     }},
    {.what = "parameters of float32 and of float64 in one unit", .act = [](Run& run) {
       Two model(values({5}), values({5}, 2).to(torch::kDouble));
       train_with_torch(run, model, {4, 5}, [&](auto& x) { return (x * model.a).to(torch::kDouble) * model.b; });
     }},
    {.what = "a parameter of integers, which does not train", .act = [](Run& run) {
       struct Model : WithHead {
         at::Tensor order;
         Model() : WithHead(5, 3) { order = register_parameter("order", torch::tensor({4, 2, 0, 1, 3}), false); }
       } model;
       train(run, model, {4, 5}, [&](auto& x) { return model.head(x.index_select(1, model.order)); });
     }},
    {.what = "a parameter registered with `requires_grad` false", .act = [](Run& run) {
       struct Model : WithHead {
         at::Tensor scale;
         Model() : WithHead(5, 3) { scale = register_parameter("scale", values({5}), false); }
       } model;
       train(run, model, {4, 5}, [&](auto& x) { return model.head(x * model.scale); });
     }},
    {.what = "parameters that were left undefined (no bias)", .act = [](Run& run) {
       const nn::LayerNorm norm(nn::LayerNormOptions({3}).elementwise_affine(false));
       nn::Sequential model(nn::Linear(nn::LinearOptions(5, 3).bias(false)), norm);
       train(run, *model, {4, 5}, [&](auto& x) { return model->forward(x) + x.narrow(1, 0, 3); });
     }},
    {.what = "parameters kept in a `std::vector` of tensors", .act = [](Run& run) {
       struct Model : nn::Module {
         std::vector<at::Tensor> weights;
         Model() {
           for (int i = 0; i < 3; i++) weights.push_back(register_parameter("w" + std::to_string(i), values({5, 5}, i)));
         }
       } model;
       train(run, model, {4, 5}, [&](at::Tensor x) {
         for (const auto& w : model.weights) x = torch::tanh(x.mm(w));
         return x;
       });
     }},
    // --- Containers ---
    {.what = "`ParameterList`", .act = [](Run& run) {
       nn::ParameterList list;
       for (int i = 0; i < 3; i++) list->append(torch::zeros({5}).set_requires_grad(true));
       train(run, *list, {4, 5}, [&](at::Tensor x) {
         for (size_t i = 0; i < list->size(); i++) x = torch::tanh(x * list[i]) + list[i];
         return x;
       });
     }},
    {.what = "`ParameterDict`", .act = [](Run& run) {
       nn::ParameterDict dict;
       dict->insert("scale", torch::zeros({5}).set_requires_grad(true));
       dict->insert("shift", torch::zeros({3, 5}).set_requires_grad(true));
       train(run, *dict, {3, 5}, [&](auto& x) { return x * dict["scale"] + dict["shift"]; });
     }},
    {.what = "`ParameterList` inside of a model, with units of its neighbours", .act = [](Run& run) {
       struct Model : WithHead {
         nn::ParameterList scales;
         Model() : WithHead(5, 3) {
           for (int i = 0; i < 2; i++) scales->append(torch::zeros({5}).set_requires_grad(true));
           register_module("scales", scales);
         }
       } model;
       train(run, model, {4, 5}, [&](auto& x) { return model.head(x * model.scales[0] + model.scales[1]); }, Units::Nested);
     }},
    {.what = "`ModuleList` whose layers are units, in a loop", .act = [](Run& run) {
       nn::ModuleList layers;
       for (int i = 0; i < 3; i++) layers->push_back(nn::Linear(5, 5));
       train(run, *layers, {4, 5}, [&](at::Tensor x) {
         for (const auto& layer : *layers) x = x + torch::tanh(layer->as<nn::Linear>()->forward(x));
         return x;
       }, Units::Nested);
     }},
    {.what = "`ModuleDict`, its modules taken by name", .act = [](Run& run) {
       nn::ModuleDict dict(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"in", nn::Linear(5, 4).ptr()},
                                                                                            {"out", nn::Linear(4, 3).ptr()}});
       train(run, *dict, {4, 5}, [&](auto& x) {
         return dict["out"]->template as<nn::Linear>()->forward(torch::tanh(dict["in"]->template as<nn::Linear>()->forward(x)));
       }, Units::Nested);
     }},
    {.what = "`Sequential`, with units within", .act = [](Run& run) {
       nn::Sequential model(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 7), nn::ReLU(), nn::Linear(7, 3));
       train(run, *model, {4, 5}, [&](auto& x) { return model->forward(x); }, Units::Nested);
     }},
    {.what = "`AnyModule`", .act = [](Run& run) {
       nn::AnyModule any(nn::Linear(5, 3));
       train(run, *any.ptr(), {4, 5}, [&](auto& x) { return any.forward(x); });
     }},
    {.what = "`Sequential` in a module, frozen in part before sharding", .act = [](Run& run) {
       struct Model : WithHead {
         nn::Sequential body{nn::Linear(5, 5), nn::Tanh(), nn::Linear(5, 5)};
         Model() : WithHead(5, 3) {
           register_module("body", body);
           body->ptr(0)->as<nn::Linear>()->bias.set_requires_grad(false);
         }
       } model;
       train(run, model, {4, 5}, [&](auto& x) { return model.head(model.body->forward(x)); }, Units::Nested);
     }},
    // --- Kinds of modules ---
    {.what = "`LSTM`", .act = [](Run& run) {
       nn::LSTM lstm(nn::LSTMOptions(5, 3).num_layers(2));
       train(run, *lstm, {4, 2, 5}, [&](auto& x) { return std::get<0>(lstm(x)); });
     }},
    {.what = "`GRU` in both directions, which starts from a state", .act = [](Run& run) {
       nn::GRU gru(nn::GRUOptions(5, 3).bidirectional(true));
       train(run, *gru, {4, 2, 5}, [&](auto& x) { return std::get<0>(gru(x, values({2, 2, 3}))); });
     }},
    {.what = "`LSTMCell` in a loop over time", .act = [](Run& run) {
       nn::LSTMCell cell(5, 3);
       train(run, *cell, {4, 2, 5}, [&](auto& x) {
         auto state = std::make_tuple(torch::zeros({2, 3}), torch::zeros({2, 3}));
         for (int t = 0; t < 4; t++) state = cell(x[t], state);
         return std::get<0>(state);
       });
     }},
    {.what = "`MultiheadAttention`", .act = [](Run& run) {
       nn::MultiheadAttention attention(6, 2);
       train(run, *attention, {3, 2, 6}, [&](auto& x) { return std::get<0>(attention(x, x, x)); });
     }},
    {.what = "`TransformerEncoder`, each layer a unit", .act = [](Run& run) {
       const nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(7).dropout(0));
       nn::TransformerEncoder encoder(nn::TransformerEncoderOptions(layer, 2));
       fill(*encoder);
       for (const auto& child : encoder->layers->children()) {
         if (run.sharded()) run.shard(*child);
       }
       run.shard(encoder);
       run.train(*encoder, [&](int step) { return encoder(run.batch({3, 2, 6}, step)).pow(2).mean(); }, run.adamw(*encoder));
     }},
    {.what = "`Embedding`, before a layer", .act = [](Run& run) {
       nn::Sequential model(nn::Embedding(7, 5), nn::Linear(5, 3));
       train(run, *model, {9}, [&](auto& x) { return model->forward(indices(x, 7)); }, Units::Nested);
     }},
    {.what = "`Embedding` with sparse gradients", .act = [](Run& run) {
       nn::Embedding words(nn::EmbeddingOptions(7, 3).sparse(true));
       train(run, *words, {4}, [&](auto& x) { return words(indices(x, 7)); });
     }},
    {.what = "`Embedding::from_pretrained`, frozen, before a layer that trains", .act = [](Run& run) {
       struct Model : WithHead {
         nn::Embedding words{nullptr};
         Model() : WithHead(3, 2) { words = register_module("words", nn::Embedding::from_pretrained(values({7, 3}))); }
       } model;
       train(run, model, {4}, [&](auto& x) { return model.head(model.words(indices(x, 7))); }, Units::Nested);
     }},
    {.what = "`EmbeddingBag`", .act = [](Run& run) {
       nn::EmbeddingBag bag(nn::EmbeddingBagOptions(7, 3).mode(torch::kMean));
       train(run, *bag, {2, 4}, [&](auto& x) { return bag(indices(x, 7)); });
     }},
    {.what = "convolutions, forth and back (`Conv2d`, `ConvTranspose2d`), in groups", .act = [](Run& run) {
       nn::Conv2d conv(nn::Conv2dOptions(4, 6, 2).groups(2));
       nn::ConvTranspose2d back(nn::ConvTranspose2dOptions(6, 3, 2));
       nn::Sequential model(conv, back);
       train(run, *model, {2, 4, 4, 4}, [&](auto& x) { return back(conv(x)); }, Units::Nested);
     }},
    {.what = "`BatchNorm2d`: its running statistics, and evaluation after training", .act = [](Run& run) {
       nn::BatchNorm2d norm(3);
       nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(2, 3, 2)), norm);
       train(run, *model, {2, 2, 4, 4}, [&](auto& x) { return model->forward(x); });
       run.record(norm->running_mean);
       run.record(norm->running_var);
       run.record(norm->num_batches_tracked);
       model->eval();
       run.record(model->forward(run.batch({2, 2, 4, 4}, 9)));
     }},
    {.what = "`LayerNorm`, `GroupNorm`, `PReLU` and `Bilinear`", .act = [](Run& run) {
       struct Model : nn::Module {
         nn::Bilinear bilinear = register_module("bilinear", nn::Bilinear(5, 5, 4));
         nn::LayerNorm layer = register_module("layer", nn::LayerNorm(nn::LayerNormOptions({4})));
         nn::GroupNorm group = register_module("group", nn::GroupNorm(2, 4));
         nn::PReLU prelu = register_module("prelu", nn::PReLU(nn::PReLUOptions().num_parameters(4)));
       } model;
       train(run, model, {3, 5}, [&](auto& x) { return model.prelu(model.group(model.layer(model.bilinear(x, x)))); });
     }},
    // --- Ways of building ---
    {.what = "a module that registers its layer in its first forward pass, before sharding", .act = [](Run& run) {
       struct Model : nn::Module {
         nn::Linear inner{nullptr};
         at::Tensor forward(const at::Tensor& x) {
           if (!inner) inner = register_module("inner", nn::Linear(x.size(1), 3));
           return inner(x);
         }
       } model;
       model.forward(torch::ones({1, 5}));
       train(run, model, {4, 5}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "layers that are sharded as soon as they are built, before they have a parent", .act = [](Run& run) {
       nn::Sequential model;
       for (int i = 0; i < 3; i++) {
         nn::Linear layer(5, 5);
         fill(*layer);
         if (run.sharded()) run.shard(layer);
         model->push_back(layer);
       }
       model->push_back(nn::Linear(5, 3));
       fill(*model[3]);
       run.shard(model);
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(*model));
     }},
    {.what = "units at three depths, with parameters of its own at each", .act = [](Run& run) {
       struct Inner : WithHead {
         at::Tensor scale;
         Inner() : WithHead(5, 5) { scale = register_parameter("scale", values({5})); }
       };
       struct Outer : WithHead {
         std::shared_ptr<Inner> inner = register_module("inner", std::make_shared<Inner>());
         at::Tensor shift = register_parameter("shift", values({5}));
         Outer() : WithHead(5, 3) {}
       } model;
       fill(model);
       if (run.sharded()) {
         run.shard(model.inner->head);
         run.shard(*model.inner);
         run.shard(model.head);
       }
       run.shard(model);
       const auto forward = [&](const at::Tensor& x) {
         return model.head(torch::tanh(model.inner->head(x + model.shift)) * model.inner->scale);
       };
       run.train(model, [&](int step) { return forward(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(model));
     }},
    {.what = "a clone of a module, made before sharding; the original stays plain", .act = [](Run& run) {
       nn::Linear original(5, 3);
       fill(*original);
       nn::Linear copy(std::dynamic_pointer_cast<nn::LinearImpl>(original->clone()));
       run.shard(copy);
       run.train(*copy, [&](int step) {
         const auto x = run.batch({4, 5}, step);
         return (copy(x) - original(x)).pow(2).mean() + copy(x).pow(2).mean();
       }, run.adamw(*copy));
       run.record(original->weight);
     }},
    {.what = "weights that came from `torch::load` before sharding", .act = [](Run& run) {
       nn::Linear saved(5, 3), model(5, 3);
       fill(*saved);
       std::stringstream file;
       torch::save(saved, file);
       torch::load(model, file);
       run.shard(model);
       run.train(*model, [&](int step) { return model(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(*model));
     }},
    {.what = "a module replaced before sharding (`replace_module`), and one taken out (`unregister_module`)", .act = [](Run& run) {
       struct Model : WithHead {
         nn::Linear extra{nullptr};
         Model() : WithHead(5, 3) { extra = register_module("extra", nn::Linear(9, 9)); }
         void change() {
           head = replace_module("head", nn::Linear(5, 2));
           unregister_module("extra");
         }
       } model;
       model.change();
       train(run, model, {4, 5}, [&](auto& x) { return model.head(x); }, Units::Nested);
     }},
    {.what = "a module converted by `to(torch::kFloat)` before sharding", .act = [](Run& run) {
       nn::Linear model(5, 3);
       model->to(torch::kDouble);
       model->to(torch::kFloat);
       train(run, *model, {4, 5}, [&](auto& x) { return model(x); });
     }},
    // --- After sharding ---
    {.what = "a module registered after sharding", .act = [](Run& run) {
       train_grown(run, [](Growing& model) { model.grow(); }, Made::After);
     }, .refused = "would not be averaged over the ranks"},
    {.what = "a module registered when the optimizer was there already, which gets gradients", .act = [](Run& run) {
       train_grown(run, [](Growing& model) { model.grow(); }, Made::Before);
     }, .refused = "'late.weight', which was not there when Growing was sharded, is trainable"},
    {.what = "a module replaced after sharding (`replace_module`)", .act = [](Run& run) {
       train_grown(run, [](Growing& model) { model.grow_in_place(); }, Made::After);
     }, .refused = "would not be averaged over the ranks"},
    {.what = "a module registered after sharding, and an optimizer of torch over `model->parameters()`", .act = [](Run& run) {
       const auto model = std::make_shared<Growing>();
       run.shard_nested(model);
       model->grow();
       const Steps steps(std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.05)));
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, steps);
     }, .refused = "'late.weight', which was not there when Growing was sharded, is trainable"},
    {.what = "a module replaced after sharding, and an optimizer of torch over `model->parameters()`", .act = [](Run& run) {
       const auto model = std::make_shared<Growing>();
       model->grow();
       run.shard_nested(model);
       model->grow_in_place();
       const Steps steps(std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.05)));
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, steps);
     }, .refused = "'head.weight', which was not there when Growing was sharded, is trainable"},
    {.what = "a module replaced between two steps", .act = [](Run& run) {
       const auto model = std::make_shared<Growing>();
       run.shard_nested(model);
       model->grow();
       for (auto& parameter : model->late->parameters()) parameter.set_requires_grad(false);
       const auto train = [&](const Steps& steps) {
         run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, steps);
       };
       train(run.sgd(*model->head));
       model->late = model->replace_module("late", nn::Linear(5, 3));
       train(run.sgd(*model->head));
     }, .refused = "'late.weight', which was not there when Growing was sharded, is trainable"},
    {.what = "a parameter registered after sharding", .act = [](Run& run) {
       train_grown(run, [](Growing& model) { model.scale = model.register_parameter("scale", values({5})); }, Made::After);
     }, .refused = "would not be averaged over the ranks"},
    {.what = "a module registered after sharding that is a sharded model of its own", .act = [](Run& run) {
       const auto model = std::make_shared<Growing>();
       run.shard_nested(model);
       model->grow();
       if (run.sharded()) run.shard(model->late);  // the plain run averages all gradients of the model
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(*model));
     }},
    {.what = "a frozen module registered after sharding", .act = [](Run& run) {
       const auto freeze = [](Growing& model) {
         model.grow();
         for (auto& parameter : model.late->parameters()) parameter.set_requires_grad(false);
       };
       train_grown(run, freeze, Made::Before);
     }},
    {.what = "a probe that is registered after sharding and only evaluated", .act = [](Run& run) {
       const auto model = std::make_shared<Growing>();
       run.shard_nested(model);
       const auto optimizer = run.adamw(*model->head);
       model->grow();
       run.train(*model->head, [&](int step) { return model->head(run.batch({4, 5}, step)).pow(2).mean(); }, optimizer);
       const torch::NoGradGuard no_grad;
       run.record(model->forward(run.batch({4, 5}, 9)));
     }},
    {.what = "an optimizer of torch over members, made after sharding", .act = [](Run& run) {
       const auto model = std::make_shared<WithHead>(5, 3);
       fill(*model);
       run.shard_nested(model);
       const Steps steps(std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{model->head->weight, model->head->bias}, 0.1));
       run.train(*model, [&](int step) { return model->head(run.batch({4, 5}, step)).pow(2).mean(); }, steps);
     }, .refused = "can't optimize a non-leaf Tensor"},
    {.what = "an optimizer of torch over frozen members that thaw", .act = [](Run& run) {
       const auto model = std::make_shared<WithHead>(5, 3);
       fill(*model);
       for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
       run.shard_nested(model);
       const Steps steps(std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{model->head->weight, model->head->bias}, 0.1));
       for (auto& parameter : model->parameters()) parameter.set_requires_grad(true);
       run.train(*model, [&](int step) { return model->head(run.batch({4, 5}, step)).pow(2).mean(); }, steps);
     }, .refused = "Make optimizers after fully_shard"},
  }};
}

}  // namespace tessera::idioms::construction
