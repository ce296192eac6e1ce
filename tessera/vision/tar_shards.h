// Tar shards of pictures, as in WebDataset: archives with pairs of files, KEY.jpg and KEY.cls, which has the number of the class.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "tessera/vision/image_set.h"

namespace tessera::vision {

/// Lists the pictures of all archives. Reads only headers and labels, mostly in one small read for each picture, so a Sampler can shuffle
/// all of them, and each is read from its place. The names of classes are their numbers, up to the highest label. Throws IoError for a
/// damaged archive, an archive without pictures, a picture without a label and a label without a picture.
ImageSet read_tar_shards(const std::vector<std::filesystem::path>& files);

/// Returns the files of a pattern such as "train-{000..146}.tar" or "{a,b}/{0..9}.tar", as bash expands it.
std::vector<std::filesystem::path> expand_braces(std::string_view pattern);

}  // namespace tessera::vision
