// for_each_tensor_in: visits the tensors in a value, such as the inputs and outputs of a module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/utils/rnn.h>
#include <torch/ordered_dict.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

/// How to visit the tensors in a T. Types without a specialisation, such as a program's own aggregates, count as having no tensors; a
/// program may add a specialisation.
template <class T>
struct TensorsIn {
  static constexpr bool kAny = false;
};

/// Whether a T can have tensors in it.
template <class T>
constexpr bool kHasTensors = TensorsIn<std::remove_cvref_t<T>>::kAny;

/// Calls `visit` for every defined tensor in the value: a tensor, or an optional, vector, array, pair, tuple, map, OrderedDict or
/// PackedSequence of values that may have tensors in them. `visit` may replace the tensor.
template <class T, class Visit>
void for_each_tensor_in(T& value, const Visit& visit) {
  if constexpr (kHasTensors<T>) TensorsIn<T>::each(value, visit);
}

template <>
struct TensorsIn<at::Tensor> {
  static constexpr bool kAny = true;
  static void each(at::Tensor& tensor, const auto& visit) {
    if (tensor.defined()) visit(tensor);
  }
};

template <class T>
struct TensorsIn<std::optional<T>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(std::optional<T>& value, const auto& visit) {
    if (value) for_each_tensor_in(*value, visit);
  }
};

template <class T, class Allocator>
struct TensorsIn<std::vector<T, Allocator>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(std::vector<T, Allocator>& values, const auto& visit) {
    for (auto& value : values) for_each_tensor_in(value, visit);
  }
};

template <class T, size_t N>
struct TensorsIn<std::array<T, N>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(std::array<T, N>& values, const auto& visit) {
    for (auto& value : values) for_each_tensor_in(value, visit);
  }
};

template <class... Ts>
struct TensorsIn<std::tuple<Ts...>> {
  static constexpr bool kAny = (kHasTensors<Ts> || ...);
  static void each(std::tuple<Ts...>& values, const auto& visit) {
    std::apply([&](auto&... value) { (for_each_tensor_in(value, visit), ...); }, values);
  }
};

template <class A, class B>
struct TensorsIn<std::pair<A, B>> {
  static constexpr bool kAny = kHasTensors<A> || kHasTensors<B>;
  static void each(std::pair<A, B>& values, const auto& visit) {
    for_each_tensor_in(values.first, visit);
    for_each_tensor_in(values.second, visit);
  }
};

template <class Key, class T, class... More>
struct TensorsIn<std::map<Key, T, More...>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(std::map<Key, T, More...>& values, const auto& visit) {
    for (auto& [key, value] : values) for_each_tensor_in(value, visit);
  }
};

template <class Key, class T, class... More>
struct TensorsIn<std::unordered_map<Key, T, More...>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(std::unordered_map<Key, T, More...>& values, const auto& visit) {
    for (auto& [key, value] : values) for_each_tensor_in(value, visit);
  }
};

template <class Key, class T>
struct TensorsIn<torch::OrderedDict<Key, T>> {
  static constexpr bool kAny = kHasTensors<T>;
  static void each(torch::OrderedDict<Key, T>& values, const auto& visit) {
    for (auto& item : values) for_each_tensor_in(item.value(), visit);
  }
};

template <>
struct TensorsIn<torch::nn::utils::rnn::PackedSequence> {
  static constexpr bool kAny = true;
  static void each(torch::nn::utils::rnn::PackedSequence& sequence, const auto& visit) {
    auto data = sequence.data();
    for_each_tensor_in(data, visit);
    sequence = torch::nn::utils::rnn::PackedSequence(data, sequence.batch_sizes(), sequence.sorted_indices(), sequence.unsorted_indices());
  }
};

}  // namespace tessera
