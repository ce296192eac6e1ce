#include "tessera/xla/device/unread.h"

#include <algorithm>

#include "tessera/base/words.h"

namespace tessera::xla {
namespace {

constexpr auto* kOfGradient = "only the gradient depends on it, which is an operator of its own";
constexpr auto* kInResult = "the tensor that takes the result shows it";
constexpr auto* kInPlaces = "the indices, another argument, decide it";
constexpr auto* kOfKernel = "it chooses among kernels with equal results";
constexpr auto* kAgain = "the gradient computes it again";
constexpr auto* kAttentionGradient = "_scaled_dot_product_fused_attention_overrideable_backward";
constexpr auto* kByMask = "it affects only gradients that nobody asks for";

struct Reason {
  const char *names, *arguments;  // separated by spaces
  const char* why;
};

constexpr Reason kReasons[] = {
    {"*", "layout device", "the device has only one"},
    {"*", "pin_memory", "the device has no pinned memory"},

    {"embedding", "padding_idx scale_grad_by_freq sparse", kOfGradient},
    {"_embedding_bag _embedding_bag_forward_only", "scale_grad_by_freq sparse", kOfGradient},
    {"_embedding_bag_backward _embedding_bag_per_sample_weights_backward", "offsets", "offset2bag has the same"},
    {"_embedding_bag_backward", "bag_size", "only means need it"},
    {"_embedding_bag_backward", "maximum_indices", "only maxima need it"},
    {"_embedding_bag_backward", "indices offset2bag", "maxima need only maximum_indices"},
    {"_embedding_bag_backward", "padding_idx", "maximum_indices names no row of padding"},
    {"_embedding_bag_backward", "scale_grad_by_freq", "libtorch does not scale gradients of maxima, either"},
    {"_embedding_bag_per_sample_weights_backward", "mode", "only sums have weights"},
    {"gather", "sparse_grad", kOfGradient},
    {"_ctc_loss", "zero_infinity", kOfGradient},

    {"_softmax _log_softmax", "half_to_float", kInResult},
    {"_softmax_backward_data _log_softmax_backward_data", "input_dtype", kInResult},
    {"argmax argmin max min", "keepdim", kInResult},

    {"max_pool2d_with_indices_backward max_pool3d_with_indices_backward", "kernel_size stride padding dilation ceil_mode", kInPlaces},
    {"max_unpool3d", "stride padding", kInPlaces},
    {"convolution_backward_overrideable", "output_padding", "the input's own sizes show it"},

    {"sort", "stable", "every sort is stable"},
    {"topk", "sorted", "results are always sorted"},
    {"isin", "assume_unique", kOfKernel},
    {"_cdist_forward", "compute_mode", kOfKernel},
    {"_index_put_impl", "unsafe", "indices are not checked"},
    {"_scaled_dot_product_fused_attention_overrideable", "return_debug_mask", "there is no debug mask"},

    {"nan_to_num", "nan posinf neginf", "whole numbers are never NaN or infinite"},
    {"leaky_relu_backward", "self_is_result", "the result has the sign of the argument"},
    {"rrelu_with_noise", "noise", "it is only written"},

    {"cumprod_backward", "output", kAgain},
    {"log_sigmoid_backward", "buffer", kAgain},
    {"multilabel_margin_loss_backward", "is_target", kAgain},
    {"nll_loss_backward nll_loss2d_backward", "total_weight", "only means need it"},
    {"native_layer_norm_backward", "weight bias", kByMask},
    {"native_batch_norm_backward", "running_mean running_var eps", "only evaluation needs it"},
    {"native_batch_norm_backward", "save_mean save_invstd", "only training needs it"},
    {kAttentionGradient, "grad_input_mask", kByMask},
    {kAttentionGradient, "cum_seq_q cum_seq_k max_q max_k", "only sequences without padding need it, and they do not use this operator"},
    {kAttentionGradient, "philox_seed philox_offset", "only dropout needs it, and it does not use this operator"},
};

}  // namespace

const std::vector<Unread>& unread_arguments() {
  static const auto& all = *[] {
    auto* const each = new std::vector<Unread>;
    for (const auto& [names, arguments, why] : kReasons) {
      for (const auto& name : words_in(names)) {
        for (const auto& argument : words_in(arguments)) each->push_back({name, argument, why});
      }
    }
    return each;
  }();
  return all;
}

bool may_be_unread(std::string_view name, std::string_view argument) {
  if (name.starts_with("aten::")) name.remove_prefix(6);
  if (name.ends_with('_')) name.remove_suffix(1);
  return std::ranges::any_of(unread_arguments(),
                             [&](const Unread& entry) { return (entry.name == "*" || name == entry.name) && argument == entry.argument; });
}

}  // namespace tessera::xla
