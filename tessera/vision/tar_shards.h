// Tar shards of pictures, as WebDataset has them: archives with pairs of files, KEY.jpg and KEY.cls, which has the number of the class.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "tessera/vision/image_set.h"

namespace tessera::vision {

/// Lists the pictures of all archives, whose headers and labels it reads: mostly one small read for each picture. So a Sampler shuffles all
/// of them, and each picture is read from its place. The classes are called by their numbers, up to the highest one that there is. Throws
/// IoError for a damaged archive, one without pictures, and for a picture without a label or a label without a picture.
ImageSet read_tar_shards(const std::vector<std::filesystem::path>& files);

/// The files of a pattern such as "train-{000..146}.tar" or "{a,b}/{0..9}.tar", as bash has them.
std::vector<std::filesystem::path> expand_braces(std::string_view pattern);

}  // namespace tessera::vision
