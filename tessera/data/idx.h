// Reads data sets in the IDX format: MNIST, Fashion-MNIST, EMNIST, KMNIST.
#pragma once

#include <filesystem>

#include "tessera/data/samples.h"

namespace tessera::data {

/// Reads a file of bytes, which may be compressed by gzip. Throws IoError, with the file and the numbers, if it is incomplete or has
/// another format.
at::Tensor read_idx(const std::filesystem::path& file);

/// Reads the images and labels of a folder. The files have the names that are usual for these data sets, for example
/// train-images-idx3-ubyte or t10k-labels.idx1-ubyte.gz. Both tensors are bytes; images are {count, height, width}.
Samples read_idx_folder(const std::filesystem::path& folder, Split split = Split::Train);

}  // namespace tessera::data
