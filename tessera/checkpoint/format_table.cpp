#include "tessera/checkpoint/format_table.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/writers.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

std::span<const FormatRow> format_rows() {
  static const std::vector<FormatRow> kRows = {
      {.format = Format::Dcp,
       .flag = "dcp",
       .name = "a folder of torch.distributed.checkpoint",
       .is_folder = [](const fs::path& folder) { return is_there(folder / ".metadata"); },
       .options = {"world", "settings", "notes_of_first_rank"},
       .read = read_dcp,
       .write = write_dcp},
      {.format = Format::Tessera,
       .flag = "tessera",
       .name = "a checkpoint of Tessera",
       .is_folder = [](const fs::path& folder) { return is_there(folder / kManifestFile); },
       .options = {"world", "notes_of_first_rank"},
       .read = [](const fs::path& path) { return read_manifest(path).catalog; },
       .write = write_ranks},
      {.format = Format::Accelerate,
       .flag = "accelerate",
       .name = "a folder of Accelerate's save_state",
       .is_folder = is_accelerate_folder,
       .takes_extra = false,
       .options = {"world", "settings", "accelerate_layout", "notes_of_first_rank"},
       .read = read_accelerate,
       .write = write_accelerate},
      {.format = Format::Hub,
       .flag = "hub",
       .name = "a folder of the Hugging Face Hub",
       .is_folder = [](const fs::path& folder) { return is_hub_folder(folder); },
       .model_alone = true,
       .options = {"max_shard_size"},
       .read = read_hub_folder,
       .write = write_hub},
      {.format = Format::Safetensors,
       .flag = "safetensors",
       .name = "a safetensors file",
       .endings = {".safetensors"},
       .model_alone = true,
       .read = read_safetensors,
       .write = write_safetensors},
      {.format = Format::Torch,
       .flag = "torch",
       .name = "a file of torch.save",
       .endings = {".pth", ".pt", ".bin"},
       .options = {"settings", "model_key", "notes_of_first_rank"},
       .read = read_torch_file,
       .write = write_torch},
      {.format = Format::TorchXla,
       .flag = "torch_xla",
       .name = "rank files of torch_xla",
       .read = [](const fs::path& path) { return read_torch_xla(path); },
       .unwritten = "rank files of torch_xla are read, not written; write a file of torch.save or a folder of the Hugging Face Hub"},
      {.format = Format::Gguf,
       .flag = "gguf",
       .name = "a GGUF file",
       .endings = {".gguf"},
       .model_alone = true,
       .options = {"code"},
       .read = [](const fs::path& path) { return read_gguf(GgufFile(path)); },
       .unwritten =
           "a GGUF file also needs a model's shape and tokens; write it from a folder of the Hugging Face Hub with llm::write_gguf",
       .package = "models"},
  };
  return kRows;
}

const FormatRow& row_of(Format format) {
  const auto rows = format_rows();
  const auto row = std::ranges::find(rows, format, &FormatRow::format);
  if (row == rows.end()) throw Error("the format {} has no row in the table", static_cast<int>(format));
  return *row;
}

std::string_view name_of(Format format) {
  return row_of(format).name;
}

}  // namespace tessera::checkpoint
