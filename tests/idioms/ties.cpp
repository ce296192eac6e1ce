// One parameter in several places, several parameters in one memory, and tensors that look into a parameter's memory.
#include "idiom.h"
#include "tessera/shard/full_params.h"

namespace tessera::idioms::ties {
namespace {

namespace nn = torch::nn;
using Forward = std::function<at::Tensor(const at::Tensor& x)>;

/// Trains a model that is filled and sharded already.
void train(Run& run, const nn::Module& model, const std::vector<int64_t>& sizes, const Forward& forward) {
  run.train(model, [&](int step) { return forward(run.batch(sizes, step)).pow(2).mean(); }, run.adamw(model));
}

/// Two layers of one shape: 5 to 5.
struct Pair : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  Pair() {
    a = register_module("a", nn::Linear(5, 5));
    b = register_module("b", nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(a(x))); }
};

/// A layer whose registered weight can be another's.
struct TiedLinear : nn::LinearImpl {
  TiedLinear() : nn::LinearImpl(5, 7) {}
  void tie(const at::Tensor& other) {
    weight = other;
    parameters_["weight"] = other;
  }
};

/// A language model: words, a layer, and words again.
struct Words : nn::Module {
  nn::Embedding words{nullptr};
  nn::Linear layer{nullptr};
  std::shared_ptr<TiedLinear> head;
  Words() {
    words = register_module("words", nn::Embedding(7, 5));
    layer = register_module("layer", nn::Linear(5, 5));
    head = register_module("head", std::make_shared<TiedLinear>());
  }
  at::Tensor forward(const at::Tensor& x) { return head->forward(torch::tanh(layer(words((x.abs() * 6.9).to(torch::kLong))))); }
};

/// Keeps a tensor that looks into its weight.
struct Looking : nn::Module {
  nn::Linear layer{nullptr};
  at::Tensor alias;
  Looking() { layer = register_module("layer", nn::Linear(5, 5)); }
};

/// Trains a model that keeps a tensor of its weight's values, and records what that shows after each step, and what it does in the loss.
void follow(Run& run, const std::function<at::Tensor(const at::Tensor& weight)>& alias_of) {
  const auto model = std::make_shared<Looking>();
  fill(*model);
  run.shard_nested(model);
  model->alias = alias_of(model->layer->weight);
  const auto optimizer = run.adamw(*model);
  for (int step = 0; step < 3; step++) {
    const auto x = run.batch({4, 5}, step);
    run.backward((model->layer(x) - x.mm(model->alias)).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
    run.record(model->alias);
  }
  run.record_parameters(*model);
}

struct ActorAndCritic : nn::Module {
  nn::Linear trunk{5, 4};
  nn::Sequential actor{trunk, nn::Tanh(), nn::Linear(4, 3)}, critic{trunk, nn::ReLU(), nn::Linear(4, 1)};
  ActorAndCritic() {
    register_module("actor", actor);
    register_module("critic", critic);
  }
};

}  // namespace

Chapter chapter() {
  return {.title = "Views, ties and aliases", .idioms = {
    {.what = "tied words: the output layer's member and its registered weight are the embedding's", .act = [](Run& run) {
       Words model;
       fill(model);
       model.head->tie(model.words->weight);
       run.shard(model);
       train(run, model, {6}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "tied words: only the member is assigned, `head->weight = words->weight`", .act = [](Run& run) {
       Words model;
       fill(model);
       model.head->weight = model.words->weight;
       run.shard(model);
       train(run, model, {6}, [&](auto& x) { return model.forward(x); });
     }, .remark = "the weight that the layer had registered stays a parameter that nobody uses"},
    {.what = "tied words, in a state for a checkpoint", .act = [](Run& run) {
       Words model;
       fill(model);
       model.head->tie(model.words->weight);
       run.shard(model);
       train(run, model, {6}, [&](auto& x) { return model.forward(x); });
       for (const std::string name : {"words.weight", "head.weight"}) {
         run.record(run.sharded() ? full_state(model).at(name) : model.words->weight);
       }
     }},
    {.what = "members that are tied in one unit, the layer between them a unit of its own", .act = [](Run& run) {
       Words model;
       fill(model);
       model.head->tie(model.words->weight);
       if (run.sharded()) run.shard(model.layer);
       run.shard(model);
       train(run, model, {6}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "a tie from one unit into another", .act = [](Run& run) {
       Words model;
       fill(model);
       model.head->tie(model.words->weight);
       run.shard_nested(model);
     }, .refused = "is tied to one of unit"},
    {.what = "an embedding's weight as output layer, `h.mm(words->weight.t())`", .act = [](Run& run) {
       Words model;
       fill(model);
       run.shard_nested(model);
       train(run, model, {6}, [&](auto& x) {
         const auto h = torch::tanh(model.layer(model.words((x.abs() * 6.9).to(torch::kLong))));
         return h.mm(model.words->weight.t()) + model.head->forward(h);
       });
     }},
    {.what = "one module under two names", .act = [](Run& run) {
       struct Model : nn::Module {
         nn::Linear first = register_module("first", nn::Linear(5, 5));
         nn::Linear again = register_module("again", first);
       } model;
       fill(model);
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.again(torch::tanh(model.first(x))); });
     }},
    {.what = "one parameter under two names of one module", .act = [](Run& run) {
       struct Model : nn::Module {
         at::Tensor w = register_parameter("w", values({5, 5}));
         at::Tensor same = register_parameter("same", w);
       } model;
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return x.mm(model.w) + x.mm(model.same.t()); });
     }},
    {.what = "a layer that is called several times in one pass", .act = [](Run& run) {
       Pair model;
       fill(model);
       run.shard_nested(model);
       train(run, model, {4, 5}, [&](at::Tensor x) {
         for (int depth = 0; depth < 3; depth++) x = torch::tanh(model.a(x));
         return model.b(x);
       });
     }},
    {.what = "two models with a common trunk, in one parent", .act = [](Run& run) {
       ActorAndCritic model;
       fill(model);
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.actor->forward(x) * model.critic->forward(x); });
     }},
    {.what = "two models with a common trunk, the trunk a unit of its own", .act = [](Run& run) {
       ActorAndCritic model;
       fill(model);
       if (run.sharded()) {
         run.shard(model.trunk);
         run.shard(model.actor);
       }
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.actor->forward(x) * model.critic->forward(x); });
     }},
    {.what = "an autoencoder whose decoder uses the encoder's kernel", .act = [](Run& run) {
       nn::Conv2d conv(nn::Conv2dOptions(2, 3, 2));
       fill(*conv);
       run.shard(conv);
       train(run, *conv, {2, 2, 4, 4}, [&](auto& x) { return torch::conv_transpose2d(torch::tanh(conv(x)), conv->weight) - x; });
     }},
    {.what = "tied biases, untied weights", .act = [](Run& run) {
       Pair model;
       fill(model);
       model.b->bias = model.a->bias;
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "a layer's weight that stands in a `ParameterList`, too", .act = [](Run& run) {
       struct Model : nn::Module {
         nn::Linear layer = register_module("layer", nn::Linear(5, 5));
         nn::ParameterList list = register_module("list", nn::ParameterList());
         Model() { list->append(layer->weight); }
       } model;
       fill(model);
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.layer(x).mm(model.list[0]); });
     }},
    {.what = "a tie that is made after sharding, `b->weight = a->weight`", .act = [](Run& run) {
       Pair model;
       fill(model);
       run.shard(model);
       model.b->weight = model.a->weight;
       train(run, model, {4, 5}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "a copy in place of a tie, `b->weight.set_data(a->weight.clone())` before sharding", .act = [](Run& run) {
       Pair model;
       fill(model);
       model.b->weight.set_data(model.a->weight.detach().clone());
       run.shard_nested(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.forward(x); });
     }},
    {.what = "a tie made by `b->weight.set_data(a->weight)`", .act = [](Run& run) {
       Pair model;
       model.b->weight.set_data(model.a->weight);
       run.shard(model);
     }, .refused = "share memory"},
    {.what = "a tie made by `set_data`, over two units", .act = [](Run& run) {
       Pair model;
       model.b->weight.set_data(model.a->weight);
       run.shard_nested(model);
       model.forward(run.batch({4, 5}));
     }, .refused = "memory"},
    {.what = "two parameters that are overlapping slices of one tensor", .act = [](Run& run) {
       const auto buffer = values({8});
       struct Model : nn::Module {
         explicit Model(const at::Tensor& all) {
           register_parameter("a", all.slice(0, 0, 5));
           register_parameter("b", all.slice(0, 3, 8));
         }
       } model(buffer);
       run.shard(model);
     }, .refused = "share memory"},
    {.what = "a parameter and its own transpose, registered both", .act = [](Run& run) {
       struct Model : nn::Module {
         at::Tensor w = register_parameter("w", values({5, 5}));
         at::Tensor t = register_parameter("t", w.detach().t());
       } model;
       run.shard(model);
     }, .refused = "share memory"},
    {.what = "`alias = weight.detach()` from the constructor, used after sharding", .act = [](Run& run) {
       Looking model;
       model.alias = model.layer->weight.detach();
       run.shard(model);
       for (int step = 0; step < 2; step++) run.backward((model.layer(run.batch({4, 5}, step)) + model.alias.sum()).pow(2).mean());
     }, .refused = "the memory that parameter"},
    {.what = "`alias = weight.t()` from the constructor, used after sharding", .act = [](Run& run) {
       Looking model;
       model.alias = model.layer->weight.t();
       run.shard(model);
       for (int step = 0; step < 2; step++) run.backward(run.batch({4, 5}, step).mm(model.alias).pow(2).mean());
     }, .refused = "the memory that parameter"},
    {.what = "`alias = weight.detach()` from the constructor, never used again", .act = [](Run& run) {
       Looking model;
       fill(model);
       model.alias = model.layer->weight.detach();
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.layer(x); });
     }},
    {.what = "a view of the weight that is made anew in every pass", .act = [](Run& run) {
       Looking model;
       fill(model);
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) {
         model.alias = model.layer->weight.t();
         return model.layer(x.mm(model.alias)) + model.alias.slice(0, 0, 4).detach();
       });
     }},
    {.what = "a copy of the initial weights to be pulled to, `weight.detach().clone()`", .act = [](Run& run) {
       Looking model;
       fill(model);
       model.alias = model.layer->weight.detach().clone();
       run.shard(model);
       train(run, model, {4, 5}, [&](auto& x) { return model.layer(x) + (model.layer->weight - model.alias).pow(2).sum(); });
       run.record(model.alias);
     }},
    {.what = "`alias = weight.data()` taken after sharding and kept: it shows each step", .act = [](Run& run) {
       follow(run, [](const at::Tensor& weight) { return weight.data(); });
     }},
    {.what = "`alias = weight.detach()`, the same", .act = [](Run& run) {
       follow(run, [](const at::Tensor& weight) { return weight.detach(); });
     }},
    {.what = "`alias = weight.data().t()[1]`, the same", .act = [](Run& run) {
       follow(run, [](const at::Tensor& weight) { return weight.data().t()[1].expand({5, 5}); });
     }},
    {.what = "`alias = weight.variable_data()`, the same", .act = [](Run& run) {
       follow(run, [](const at::Tensor& weight) { return weight.variable_data(); });
     }},
    {.what = "a write through `alias = weight.data()` that was kept", .act = [](Run& run) {
       const auto model = std::make_shared<Looking>();
       fill(*model);
       run.shard(model);
       model->alias = model->layer->weight.data();
       run.backward(model->layer(run.batch({4, 5})).pow(2).mean());
       model->alias.mul_(0.5);
     }, .refused = "would write"},
    {.what = "the same within `tessera::full_params` for writing", .act = [](Run& run) {
       const auto model = std::make_shared<Looking>();
       fill(*model);
       run.shard(model);
       model->alias = model->layer->weight.data();
       train(run, *model, {4, 5}, [&](auto& x) {
         {
           std::optional<FullParams> guard;
           if (run.sharded()) guard.emplace(full_params(*model, Access::Write));
           model->alias.mul_(0.9);
         }
         return model->layer(x);
       });
     }},
    {.what = "the pointer of `alias = weight.data()` that was kept", .act = [](Run& run) {
       const auto model = std::make_shared<Looking>();
       fill(*model);
       run.shard(model);
       model->alias = model->layer->weight.data();
       run.backward(model->layer(run.batch({4, 5})).pow(2).mean());
       run.record(model->alias.data_ptr<float>()[0]);
     }, .refused = "raw pointers need tessera::full_params"},
  }};
}

}  // namespace tessera::idioms::ties
