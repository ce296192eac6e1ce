// Data sets in the IDX format: MNIST, Fashion-MNIST, EMNIST, KMNIST.
#pragma once

#include <filesystem>

#include "tessera/data/samples.h"

namespace tessera::data {

/// One file of bytes, plain or packed by gzip. Anything but a complete one is an IoError that names the file and the numbers.
at::Tensor read_idx(const std::filesystem::path& file);

/// Images and labels of a folder, under the names that these data sets have: train-images-idx3-ubyte or t10k-labels.idx1-ubyte, with or
/// without .gz. Both are bytes; images are {count, height, width}.
Samples read_idx_folder(const std::filesystem::path& folder, Split split = Split::Train);

}  // namespace tessera::data
