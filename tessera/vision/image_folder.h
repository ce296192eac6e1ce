// Folders of pictures: FOLDER/CLASS/.../NAME.jpg, as torchvision.datasets.ImageFolder reads them.
#pragma once

#include <filesystem>

#include "tessera/vision/image_set.h"

namespace tessera::vision {

/// Lists the pictures of all classes, without opening one. Classes and pictures have torchvision's order, so labels are the same. Throws
/// IoError for a folder without classes, a class without pictures, and pictures of a format that is not supported. Each rank reads the
/// folder itself; if ranks may see different files, compare fingerprints.
ImageSet read_image_folder(const std::filesystem::path& folder);

}  // namespace tessera::vision
