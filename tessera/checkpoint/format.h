// The formats of checkpoints and weights that Tessera reads.
#pragma once

#include <filesystem>
#include <string_view>

namespace tessera::checkpoint {

/// A checkpoint of Tessera, a folder of PyTorch's distributed checkpoint, a folder of the Hugging Face Hub, a safetensors file, a file of
/// torch.save, a folder of Accelerate's save_state, the rank files of torch_xla (given as the prefix P of files P_rank-R-of-N.pth, as one
/// of them, or as a pattern with *), or a GGUF file.
enum class Format { Tessera, Dcp, Hub, Safetensors, Torch, Accelerate, TorchXla, Gguf };
std::string_view name_of(Format format);

/// The kinds of files in a folder of Accelerate.
enum class AccelerateLayout {
  Sharded,     // folders of torch.distributed.checkpoint, as with SHARDED_STATE_DICT
  Full,        // files of torch.save, as with FULL_STATE_DICT
  Replicated,  // model.safetensors and optimizer.bin, as Accelerate writes them without FSDP (with MULTI_CPU)
};

/// Recognises the format from the files at the path. Throws IoError if the path has none of these formats, and the error names checkpoints
/// inside and next to it; throws UsageError if the path is one file of a checkpoint folder.
Format format_of(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
