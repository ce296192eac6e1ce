// Runs compiled programs.
#include <fmt/format.h>

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/xla/pjrt/client_impl.h"

namespace tessera::pjrt {
namespace {

/// Checks arguments, because plugins check less. One plugin takes an argument of a wrong type if it has the right number of bytes, and
/// starts no program any more once it has refused arguments of several replicas.
void expect_arguments(std::span<const std::vector<Buffer>> arguments, const Executable::Impl& program) {
  if (arguments.size() != static_cast<size_t>(program.replicas)) {
    throw UsageError("a program for {} replicas got arguments for {}", program.replicas, arguments.size());
  }
  for (size_t replica = 0; replica < arguments.size(); replica++) {
    const auto& list = arguments[replica];
    if (list.size() != program.parameters.size()) {
      throw UsageError("a program with {} parameters got {} arguments", program.parameters.size(), list.size());
    }
    for (size_t i = 0; i < list.size(); i++) {
      const auto expected = [&](const std::string& problem) { throw UsageError("argument {} of replica {} {}", i, replica, problem); };
      if (!list[i]) expected("is missing");
      if (list[i].type() != program.parameters[i].type) {
        expected(fmt::format("is a {}, where the program takes a {}", text_of(list[i].type()), text_of(program.parameters[i].type)));
      }
      if (list[i].device() != static_cast<int>(replica)) expected(fmt::format("is on device {}", list[i].device()));
      if (list[i].is_donated()) expected("was donated to a program that ran before");
    }
  }
}

void expect_donated_once(const std::vector<PJRT_Buffer*>& arguments, const std::vector<Parameter>& parameters) {
  std::unordered_map<const PJRT_Buffer*, size_t> first;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto [where, is_new] = first.emplace(arguments[i], i);
    if (!is_new && (parameters[i].donated || parameters[where->second].donated)) {
      throw UsageError("arguments {} and {} are the same buffer, which the program may overwrite: give a copy for one of them", where->second, i);
    }
  }
}

}  // namespace

CompiledProgram Executable::compiled() const {
  return CompiledProgram({impl_, impl_->compiled.get()});  // shares ownership, because the compiled form is valid only while the loaded program lives
}

int Executable::replicas() const {
  return impl_->replicas;
}

std::vector<std::vector<Buffer>> Executable::run(std::span<const std::vector<Buffer>> arguments) const {
  expect_arguments(arguments, *impl_);
  const size_t replicas = arguments.size(), count = impl_->outputs.size();
  std::vector<std::vector<PJRT_Buffer*>> in(replicas), out(replicas, std::vector<PJRT_Buffer*>(count));
  std::vector<PJRT_Buffer* const*> in_lists;
  std::vector<PJRT_Buffer**> out_lists;
  for (size_t replica = 0; replica < replicas; replica++) {
    for (const auto& buffer : arguments[replica]) in[replica].push_back(buffer.impl_->handle.get());
    expect_donated_once(in[replica], impl_->parameters);
    in_lists.push_back(in[replica].data());
    out_lists.push_back(out[replica].data());
  }
  Padded<PJRT_ExecuteOptions> options;
  impl_->handle.call("run a program", &PJRT_Api::PJRT_LoadedExecutable_Execute,
                     {.executable = impl_->handle.get(),
                      .options = &options,
                      .argument_lists = in_lists.data(),
                      .num_devices = replicas,
                      .num_args = impl_->parameters.size(),
                      .output_lists = out_lists.data()});
  std::vector<std::vector<Buffer>> results(replicas);
  for (size_t replica = 0; replica < replicas; replica++) {
    for (size_t i = 0; i < count; i++) {
      results[replica].emplace_back(
          std::make_shared<Buffer::Impl>(impl_->client, out[replica][i], impl_->outputs[i], static_cast<int>(replica)));
    }
  }
  return results;
}

}  // namespace tessera::pjrt
