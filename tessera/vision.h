// The package vision: pictures out of files. Each header also stands alone.
#pragma once

#include "tessera/vision/fetch_images.h"
#include "tessera/vision/image.h"
#include "tessera/vision/image_folder.h"
#include "tessera/vision/image_set.h"
#include "tessera/vision/mixing.h"
#include "tessera/vision/tar_shards.h"
#include "tessera/vision/transforms.h"
