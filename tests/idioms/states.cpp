// What is saved, loaded and copied: states of models and optimizers, before sharding and after it.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>

#include "idiom.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/local.h"

namespace tessera::idioms::states {
namespace {

namespace nn = torch::nn;

constexpr auto kPartAlone = "would write this rank's part of";

struct Net : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  nn::BatchNorm1d norm{nullptr};
  Net() {
    first = register_module("first", nn::Linear(6, 5));
    norm = register_module("norm", nn::BatchNorm1d(5));
    second = register_module("second", nn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};

void train(Run& run, Net& model, const Steps& optimizer) {
  run.train(model, [&](int step) { return loss_of(run, model, step); }, optimizer);
}

std::shared_ptr<Net> trained(Run& run) {
  const auto model = std::make_shared<Net>();
  run.shard_nested(model);
  train(run, *model, run.adamw(*model));
  return model;
}

at::Tensor evaluation(Run& run, Net& model) {
  const torch::NoGradGuard no_grad;
  model.eval();
  const auto y = model.forward(run.batch({4, 6}, 30));
  model.train();
  return y;
}

/// Returns what `torch::save` writes of a part of a trained model.
std::string save(Run& run, const auto& of) {
  const auto model = trained(run);
  std::stringstream file;
  torch::save(of(model), file);
  return file.str();
}

at::Tensor read(const std::string& saved) {
  std::istringstream file(saved);
  at::Tensor value;
  torch::load(value, file);
  return value;
}

/// Trains, saves, and trains another model and optimizer on from what was saved. The plain run trains on.
void resume(Run& run, const std::function<void(const std::filesystem::path& to, const checkpoint::Contents& what)>& save) {
  const auto train_steps = [&](Mlp& model, const Steps& optimizer, int first) {
    for (int step = first; step < first + 2; step++) {
      const auto loss = loss_of(run, model, step);
      run.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      run.record(loss);
    }
  };
  const auto contents_of = [](Mlp& model, const Steps& optimizer) {
    checkpoint::Contents contents{.model = &model};
    contents.optimizer = optimizer.ours() != nullptr ? checkpoint::OptimizerRef(optimizer.ours()) : optimizer.theirs();
    return contents;
  };
  const auto model = nested(run);
  const auto optimizer = run.adamw(*model);
  train_steps(*model, optimizer, 0);
  if (!run.sharded()) {
    train_steps(*model, optimizer, 2);
    return run.record_parameters(*model);
  }
  const auto folder = std::filesystem::temp_directory_path() / ("tessera-idioms-" + std::to_string(::getpid()) + "-" + std::to_string(run.ranks()));
  save(folder, contents_of(*model, optimizer));
  const auto next = nested(run);
  const auto other = run.adamw(*next);
  auto into = contents_of(*next, other);
  checkpoint::load(folder, into, run.world());
  train_steps(*next, other, 2);
  run.record_parameters(*next);
  run.world().barrier();
  if (run.world().is_first()) std::filesystem::remove_all(folder);
  run.world().barrier();
}

struct Tied : nn::Module {
  nn::Embedding words = register_module("words", nn::Embedding(7, 4));
  nn::Linear head = register_module("head", nn::Linear(nn::LinearOptions(4, 7).bias(false)));
  Tied() {
    fill(*this);
    head->weight = words->weight;
  }
  at::Tensor forward(const at::Tensor& index) { return head(torch::tanh(words(index))); }
};

/// A model with a second name for a registered parameter.
struct TiedByName : nn::Module {
  nn::Embedding words = register_module("words", nn::Embedding(7, 4));
  at::Tensor head;
  TiedByName() {
    fill(*this);
    head = register_parameter("head", words->weight);
  }
  at::Tensor forward(const at::Tensor& index) { return torch::linear(torch::tanh(words(index)), head); }
};

template <class Model>
void train_tied(Run& run, const std::string& other_name) {
  const auto model = std::make_shared<Model>();
  run.shard(model);
  const auto optimizer = run.sgd(*model);
  for (int step = 0; step < 4; step++) {
    const auto loss = model->forward(torch::tensor({1, 4, 6}).add(step + run.rank()).remainder(7)).pow(2).mean();
    run.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
  const auto state = full_state(*model);
  run.record(state.at("words.weight"));
  run.record(static_cast<double>(state.count(other_name)));
}

/// Changes the second layer, and takes back what `keep` has kept of it.
void restore_part(Run& run, const std::function<void(nn::Linear& part, const std::function<void()>& change)>& keep) {
  const auto model = std::make_shared<Net>();
  run.shard(model);
  train(run, *model, run.adamw(*model));
  keep(model->second, [&] {
    const torch::NoGradGuard no_grad;
    for (const auto& p : run.parameters(*model)) p.mul_(0.5);
  });
  run.record_parameters(*model);
  run.record(evaluation(run, *model));
}

checkpoint::OptimizerRef reference_to(const Steps& optimizer) {
  return optimizer.ours() != nullptr ? checkpoint::OptimizerRef(optimizer.ours()) : checkpoint::OptimizerRef(optimizer.theirs());
}

/// A run that is saved in a format, and that another model and optimizer take up.
Idiom resumed(const std::string& format, const checkpoint::SaveOptions& options, const char* name = "run") {
  return {.what = fmt::format("a run that is saved as {}, and resumed by another model and optimizer", format),
          .act = [options, name](Run& run) {
            const Folder folder(run);
            if (run.rank() == 0) std::filesystem::create_directories(folder.path);
            run.world().barrier();
            const auto first = nested(run), second = nested(run);
            const auto save = run.adamw(*first), load = run.adamw(*second);
            run.train(*first, [&](int step) { return loss_of(run, *first, step); }, save);
            checkpoint::save(folder.path / name, {.model = first.get(), .optimizer = reference_to(save)}, run.world(), options);
            run.world().barrier();
            checkpoint::Contents contents{.model = second.get(), .optimizer = reference_to(load)};
            checkpoint::load(folder.path / name, contents, run.world());
            run.world().barrier();
            run.record_parameters(*second);
            run.train(*second, [&](int step) { return loss_of(run, *second, step + 4); }, load);
          }};
}

}  // namespace

Chapter chapter() {
  using checkpoint::Format;
  return {.title = "States",
          .idioms = {
              {.what = "`tessera::full_state` after training, of a model that is sharded or not",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     sync_buffers(*model, run.world());
                     for (const auto& [name, tensor] : full_state(*model)) {
                       run.record(sum_of(name));
                       run.record(tensor);
                     }
                   },
               .remark = "it has the buffers of rank 0, hence `sync_buffers` before it"},
              {.what = "a layer that its parent's unit holds, saved and loaded by itself by `full_state_dict`",
               .act =
                   [](Run& run) {
                     restore_part(run, [&](nn::Linear& part, const std::function<void()>& change) {
                       std::map<std::string, at::Tensor> kept;
                       if (run.sharded()) {
                         kept = checkpoint::full_state_dict(*part);
                       } else {
                         for (const auto& item : part->named_parameters()) kept[item.key()] = item.value().detach().clone();
                       }
                       change();
                       run.record(static_cast<double>(kept.size()));
                       if (run.sharded()) return checkpoint::load_full_state_dict(*part, kept);
                       const torch::NoGradGuard no_grad;
                       for (const auto& item : part->named_parameters()) item.value().copy_(kept.at(item.key()));
                     });
                   }},
              {.what = "the same by `sharded_state_dict` and by `local_state_dict`",
               .act =
                   [](Run& run) {
                     restore_part(run, [&](nn::Linear& part, const std::function<void()>& change) {
                       if (!run.sharded()) {
                         const auto weight = part->weight.detach().clone(), bias = part->bias.detach().clone();
                         change();
                         const torch::NoGradGuard no_grad;
                         part->weight.copy_(weight);
                         part->bias.copy_(bias);
                         return;
                       }
                       const auto sharded = checkpoint::sharded_state_dict(*part);
                       const auto local = checkpoint::local_state_dict(*part);
                       change();
                       checkpoint::load_local_state_dict(*part, local);
                       checkpoint::load_sharded_state_dict(*part, sharded);
                     });
                   }},
              {.what = "`tessera::full_state` of one name",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     run.record(full_tensor(*model, "second.weight"));
                     run.record(full_tensor(*model, "norm.num_batches_tracked"));
                   }},
              {.what = "`tessera::full_state` for rank 0 alone, which saves it",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     const auto state = full_state(*model, Ranks::First);
                     if (run.rank() != 0) return;
                     for (const auto& [name, tensor] : state) {
                       std::stringstream file;
                       torch::save(tensor, file);
                       run.record(read(file.str()));
                     }
                   }},
              {.what = "`tessera::full_state` between forward and backward",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     run.shard_nested(model);
                     const auto loss = [&](int step) {
                       const auto value = loss_of(run, *model, step);
                       run.record(full_tensor(*model, "first.weight"));
                       return value;
                     };
                     run.train(*model, loss, run.adamw(*model));
                   }},
              {.what = "a plain model for an evaluation, made from `tessera::full_state`",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     const auto state = full_state(*model, Ranks::All, BufferSync::None);
                     Net plain;
                     const torch::NoGradGuard no_grad;
                     for (auto& item : plain.named_parameters()) item.value().copy_(state.at(item.key()));
                     for (auto& item : plain.named_buffers()) item.value().copy_(state.at(item.key()));
                     run.record(evaluation(run, plain));
                   }},
              {.what = "tied weights, assigned as members only: `full_state` has both names",
               .act = [](Run& run) { train_tied<Tied>(run, "head.weight"); }},
              {.what = "tied weights, registered under two names: `full_state` has both",
               .act = [](Run& run) { train_tied<TiedByName>(run, "head"); }},
              {.what = "the names of `named_parameters()` and `named_buffers()`",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     for (const auto& item : model->named_parameters()) run.record(sum_of(item.key()));
                     for (const auto& item : model->named_buffers()) run.record(sum_of(item.key()));
                     run.record(static_cast<double>(model->named_parameters().size()));
                   }},
              {.what = "`torch::save` of the sharded model",
               .act = [](Run& run) { save(run, [](auto& model) { return model; }); },
               .refused = kPartAlone},
              {.what = "`if (rank == 0) torch::save(model, file)`",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     std::stringstream file;
                     if (run.rank() == 0) torch::save(model, file);
                   },
               .refused = kPartAlone},
              {.what = "`torch::save` of a part of the sharded model, `model->first`",
               .act = [](Run& run) { save(run, [](auto& model) { return model->first; }); },
               .refused = kPartAlone},
              {.what = "`torch::save` of whole weights within `full_params`, alone and in a list",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     const auto whole = full_params(*model, Access::Read);
                     std::stringstream one, several;
                     torch::save(model->first->weight, one);
                     torch::save(std::vector{model->first->bias, model->second->weight}, several);
                     at::Tensor weight;
                     std::vector<at::Tensor> rest;
                     torch::load(weight, one);
                     torch::load(rest, several);
                     run.record(weight);
                     for (const auto& tensor : rest) run.record(tensor);
                   }},
              {.what = "`torch::save` of what is computed from a whole weight, such as `layer->weight.clone()`",
               .act = [](Run& run) { run.record(read(save(run, [](auto& model) { return model->first->weight.detach().clone(); }))); }},
              {.what = "`torch::save(layer->weight)`",
               .act = [](Run& run) { run.record(read(save(run, [](auto& model) { return model->first->weight; }))); },
               .refused = "raw pointers need tessera::full_params",
               .remark = "while the unit is unsharded, as within `tessera::unshard`, it is saved as it is there: whole, in its `param_dtype`"},
              {.what = "`torch::pickle_save(layer->weight)`",
               .act = [](Run& run) { torch::pickle_save(trained(run)->first->weight); },
               .refused = "raw pointers need tessera::full_params"},
              {.what = "`torch::save` of the sharded model to a file with the rank in its name",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     const auto& setting = run.setting();
                     const auto name = "tessera-idioms-" + std::to_string(setting.ranks) + "-" + std::to_string(run.rank()) + ".pt";
                     const auto path = std::filesystem::temp_directory_path() / name;
                     try {
                       torch::save(model, path.string());
                     } catch (const UsageError&) {
                       std::filesystem::remove(path);
                       throw;
                     }
                     std::filesystem::remove(path);
                   },
               .refused = kPartAlone},
              {.what = "`torch::save` of the list of parameters",
               .act = [](Run& run) { save(run, [&](auto& model) { return run.parameters(*model); }); },
               .refused = kPartAlone},
              {.what = "`torch::save` of a gradient",
               .act =
                   [](Run& run) {
                     save(run, [&](auto& model) {
                       run.backward(loss_of(run, *model, 5));
                       return run.parameters(*model)[0].grad();
                     });
                   },
               .refused = kPartAlone},
              {.what = "`torch::save` of what was computed from a parameter, `2 * weight.detach()`",
               .act = [](Run& run) { save(run, [&](auto& model) { return 2 * run.parameters(*model)[0].detach(); }); },
               .refused = kPartAlone},
              {.what = "`torch::pickle_save` of a dict of parameters",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     c10::Dict<std::string, at::Tensor> dict;
                     for (const auto& item : model->named_parameters()) dict.insert(item.key(), item.value());
                     torch::pickle_save(dict);
                   },
               .refused = kPartAlone},
              {.what = "`torch::save` of this rank's values, `tessera::to_local(shard)`, and `copy_` of them back",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     auto weight = run.parameters(*model)[0];
                     std::stringstream file;
                     torch::save(run.sharded() ? to_local(weight) : weight.detach().clone(), file);
                     const torch::NoGradGuard no_grad;
                     weight.zero_();
                     at::Tensor read;
                     torch::load(read, file);
                     weight.copy_(read);
                     run.record_parameters(*model);
                   },
               .on_xla = "files and `cpu()` have the values of the first device alone; `checkpoint::save` writes those of all"},
              {.what = "weights loaded before sharding",
               .act =
                   [](Run& run) {
                     std::stringstream file;
                     {
                       const auto source = std::make_shared<Net>();
                       const torch::NoGradGuard no_grad;
                       for (auto& parameter : source->parameters()) parameter.mul_(1.5);
                       torch::save(source, file);
                     }
                     auto model = std::make_shared<Net>();
                     torch::load(model, file);
                     run.shard_nested(model);
                     train(run, *model, run.adamw(*model));
                   }},
              {.what = "weights copied by name into the model before sharding",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     {
                       const torch::NoGradGuard no_grad;
                       for (auto& item : model->named_parameters()) item.value().copy_(values(item.value().sizes(), 4));
                     }
                     run.shard(model);
                     train(run, *model, run.sgd(*model));
                   }},
              {.what = "weights copied into the members after sharding, within `full_params` for writing",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     {
                       const auto whole = full_params(*model, Access::Write);
                       const torch::NoGradGuard no_grad;
                       model->first->weight.copy_(values({5, 6}, 3));
                       nn::init::constant_(model->second->bias, 0.25);
                     }
                     train(run, *model, run.adamw(*model));
                   }},
              {.what = "`torch::load` of whole weights into the sharded model",
               .act =
                   [](Run& run) {
                     std::stringstream file;
                     torch::save(std::make_shared<Net>(), file);
                     auto model = std::make_shared<Net>();
                     run.shard_nested(model);
                     torch::load(model, file);
                   },
               .refused = "before fully_shard"},
              {.what = "`clone()` of the sharded model",
               .act =
                   [](Run& run) {
                     struct Model : nn::Cloneable<Model> {
                       at::Tensor w;
                       Model() { reset(); }
                       void reset() override { w = register_parameter("w", values({5, 3})); }
                     };
                     const auto model = std::make_shared<Model>();
                     run.shard(model);
                     model->clone();
                   },
               .refused = "clone it before fully_shard"},
              {.what = "`clone()` before sharding, and both trained",
               .act =
                   [](Run& run) {
                     nn::Linear one(6, 3);
                     fill(*one);
                     nn::Linear other(std::dynamic_pointer_cast<nn::LinearImpl>(one->clone()));
                     run.shard(one);
                     run.shard(other);
                     run.train(*one, [&](int step) { return one(run.batch({4, 6}, step)).pow(2).mean(); }, run.adamw(*one));
                     run.train(*other, [&](int step) { return other(run.batch({4, 6}, step)).abs().mean(); }, run.sgd(*other));
                   }},
              {.what = "`set_data` on a parameter of the sharded model",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     model->first->weight.set_data(values({5, 6}));
                   },
               .refused = "cut it off"},
              {.what = "`to(device)` that changes nothing",
               .act =
                   [](Run& run) {
                     const auto model = trained(run);
                     model->to(torch::kCPU);
                     model->to(torch::kFloat);
                     train(run, *model, run.sgd(*model));
                   }},
              {.what = "the best weights so far, kept and put back",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     run.shard_nested(model);
                     const auto parameters = run.parameters(*model);
                     train(run, *model, run.adamw(*model));
                     std::vector<at::Tensor> best;
                     for (const auto& parameter : parameters) best.push_back(parameter.detach().clone());
                     train(run, *model, run.adamw(*model));
                     {
                       const torch::NoGradGuard no_grad;
                       for (size_t i = 0; i < parameters.size(); i++) parameters[i].copy_(best[i]);
                     }
                     run.record(evaluation(run, *model));
                     train(run, *model, run.sgd(*model));
                   }},
              {.what = "a target network that is copied at first and then follows slowly",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>(), target = std::make_shared<Net>();
                     run.shard_nested(model);
                     run.shard_nested(target);
                     const auto optimizer = run.adamw(*model);
                     for (int step = 0; step < 4; step++) {
                       run.backward(loss_of(run, *model, step));
                       optimizer.step();
                       optimizer.zero_grad();
                       const torch::NoGradGuard no_grad;
                       const auto from = run.parameters(*model), to = run.parameters(*target);
                       for (size_t i = 0; i < to.size(); i++) step == 0 ? to[i].copy_(from[i]) : to[i].mul_(0.75).add_(from[i] * 0.25);
                       run.record(evaluation(run, *target));
                     }
                     run.record_parameters(*target);
                   }},
              {.what = "the state of an optimizer of torch, by `torch::save`",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     run.shard_nested(model);
                     const auto options = torch::optim::AdamWOptions(0.05).eps(run.setting().epsilon);
                     Steps optimizer(std::make_unique<torch::optim::AdamW>(run.parameters(*model), options));
                     train(run, *model, optimizer);
                     std::stringstream file;
                     torch::save(*optimizer.theirs(), file);
                   },
               .refused = kPartAlone},
              {.what = "the state of an optimizer of Tessera, by `state` and `load_state`, into a new optimizer",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     run.shard_nested(model);
                     const optim::AdamWOptions options{.lr = 0.05, .eps = run.setting().epsilon};
                     const Steps optimizer(std::make_unique<optim::AdamW>(run.parameters(*model), options));
                     train(run, *model, optimizer);
                     const Steps next(std::make_unique<optim::AdamW>(run.parameters(*model), options));
                     next.ours()->load_state(*model, optimizer.ours()->state(*model));
                     train(run, *model, next);
                   }},
              {.what = "full state dicts of a model and of its optimizer, by `broadcast_from_rank0` into new ones",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>(), next = std::make_shared<Net>();
                     run.shard_nested(model);
                     run.shard(next);
                     const auto options = torch::optim::AdamWOptions(0.05).eps(run.setting().epsilon);
                     const Steps optimizer(std::make_unique<torch::optim::AdamW>(run.parameters(*model), options));
                     const Steps other(std::make_unique<torch::optim::AdamW>(run.parameters(*next), options));
                     train(run, *model, optimizer);
                     sync_buffers(*model, run.world());
                     const bool sharded = run.sharded();
                     const auto weights = checkpoint::full_state_dict(*model, {.rank0_only = sharded});
                     const auto state = checkpoint::full_optim_state_dict(optimizer.theirs(), *model, {.rank0_only = sharded});
                     checkpoint::load_full_state_dict(*next, weights, {.broadcast_from_rank0 = sharded});
                     checkpoint::load_full_optim_state_dict(other.theirs(), *next, state, {.broadcast_from_rank0 = sharded});
                     train(run, *next, other);
                   }},
              {.what = "a state dict whose names for a tied weight contradict each other",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<TiedByName>();
                     run.shard(model);
                     auto dict = checkpoint::full_state_dict(*model);
                     dict["head"] = dict.at("head") + 1;
                     if (run.sharded()) checkpoint::load_full_state_dict(*model, dict);
                   },
               .refused = "differ there"},
              {.what = "the same, with `first_of_tied`",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<TiedByName>();
                     run.shard(model);
                     auto dict = checkpoint::full_state_dict(*model);
                     dict["head"] = dict.at("head") + 1;
                     checkpoint::load_full_state_dict(*model, dict, {.first_of_tied = true});
                     for (const auto& [name, tensor] : checkpoint::full_state_dict(*model)) run.record(tensor);
                   }},
              resumed("`Format::Tessera`", {}),
              resumed("`Format::Dcp`", {.format = Format::Dcp}),
              resumed("`Format::Torch`", {.format = Format::Torch}, "run.pt"),
              resumed("`Format::Accelerate`", {.format = Format::Accelerate}),
              resumed("`Format::Accelerate` with `AccelerateLayout::Full`",
                      {.format = Format::Accelerate, .accelerate_layout = checkpoint::AccelerateLayout::Full}),
              {.what = "a parameter whose name is not UTF-8, saved",
               .act =
                   [](Run& run) {
                     struct Odd : nn::Module {
                       at::Tensor held = register_parameter("a\xff", values({3}));
                     };
                     const auto model = std::make_shared<Odd>();
                     run.shard(*model);
                     const Folder folder(run);
                     checkpoint::save(folder.path, {.model = model.get()}, run.world(), {.format = Format::Dcp});
                   },
               .refused = "its name is not UTF-8"},
              {.what = "a run loaded by its prefix",
               .act =
                   [](Run& run) {
                     const auto model = nested(run);
                     const Folder folder(run);
                     checkpoint::Contents contents{.model = model.get()};
                     checkpoint::save(checkpoint::step_folder(folder.path / "run", 2), contents, run.world());
                     run.world().barrier();
                     checkpoint::load(folder.path / "run", contents, run.world());
                   },
               .refused = "did you mean"},
              {.what = "moments of an optimizer of torch set to zero by hand",
               .act =
                   [](Run& run) {
                     const auto model = std::make_shared<Net>();
                     run.shard(model);
                     const Steps optimizer(std::make_unique<torch::optim::Adam>(run.parameters(*model), torch::optim::AdamOptions(0.05).eps(run.setting().epsilon)));
                     train(run, *model, optimizer);
                     const torch::NoGradGuard no_grad;
                     for (auto& [key, state] : optimizer.theirs()->state()) {
                       auto& adam = dynamic_cast<torch::optim::AdamParamState&>(*state);
                       adam.exp_avg().zero_();
                       adam.exp_avg_sq().mul_(0.5);
                     }
                     const at::AutoGradMode grad(true);
                     train(run, *model, optimizer);
                   }},
              {.what = "a buffer assigned and changed by the program",
               .act =
                   [](Run& run) {
                     struct Model : Net {
                       at::Tensor mean = register_buffer("mean", torch::zeros({6}));
                       at::Tensor forward(const at::Tensor& x) {
                         mean.mul_(0.9).add_(x.detach().mean(0) * 0.1);
                         return Net::forward(x - mean);
                       }
                     };
                     const auto model = std::make_shared<Model>();
                     run.shard(model);
                     run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.adamw(*model));
                     run.record(model->mean);
                     sync_buffers(*model, run.world(), BufferSync::Mean);
                     for (const auto& item : model->named_buffers()) run.record(item.value());
                   }},
              {.what = "a run that resumes from a folder of Accelerate's, which was saved over an earlier one",
               .act =
                   [](Run& run) {
                     resume(run, [&](const std::filesystem::path& to, const checkpoint::Contents& what) {
                       const checkpoint::SaveOptions options{.format = checkpoint::Format::Accelerate};
                       checkpoint::save(to, {.model = nested(run).get()}, run.world(), options);
                       checkpoint::save(to, what, run.world(), options);
                     });
                   }},
              {.what = "a run that resumes from what an `AsyncSaver` has saved while the model was changed",
               .act =
                   [](Run& run) {
                     resume(run, [&](const std::filesystem::path& to, const checkpoint::Contents& what) {
                       checkpoint::AsyncSaver saver(run.world());
                       saver.save(to, what);
                       checkpoint::load_full_state_dict(*what.model, checkpoint::full_state_dict(*nested(run)));
                       saver.wait();
                     });
                   }},
              {.what = "weights in a Hub folder of several files, saved over earlier ones, in another model",
               .act =
                   [](Run& run) {
                     const auto model = nested(run), other = nested(run);
                     run.train(*model, [&](int step) { return loss_of(run, *model, step); }, run.adamw(*model));
                     if (!run.sharded()) return run.record_parameters(*model);
                     const auto folder = std::filesystem::temp_directory_path() / ("tessera-idioms-" + std::to_string(::getpid()) + "-hub");
                     for (const auto& each : {other, model}) {
                       const checkpoint::SaveOptions options{.format = checkpoint::Format::Hub, .max_shard_size = 64};
                       checkpoint::save(folder, {.model = each.get()}, run.world(), options);
                     }
                     checkpoint::load_weights(*other, folder);
                     run.record_parameters(*other);
                     run.world().barrier();
                     if (run.world().is_first()) std::filesystem::remove_all(folder);
                     run.world().barrier();
                   }},
          }};
}

}  // namespace tessera::idioms::states
