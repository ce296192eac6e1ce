// All of Tessera's public headers.
#pragma once

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/init.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tessera/optim/learning_rate.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/model.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/rebind.h"
