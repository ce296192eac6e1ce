// For programs that extend Tessera: the classes to derive from, and what these are made of. Programs that only train need
// tessera/tessera.h. docs/extending.md says how each kind of part is added.
#pragma once

#include "tessera/base/error.h"
#include "tessera/base/storage.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/shm/shm_link.h"
#include "tessera/comm/transport.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/update_range.h"
#include "tessera/shard/codec.h"
#include "tessera/train/reporter.h"
