// The package vision: pictures out of files. Each header also stands alone.
#pragma once

#include "tessera/vision/image.h"
