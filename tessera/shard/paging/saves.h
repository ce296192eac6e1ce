// What libtorch writes into files itself: torch::save, pickle_save.
#pragma once

namespace tessera {

/// From now on, libtorch refuses to write a tensor that has only this rank's part of the values, because nothing in the file would say so.
/// Once per process.
void watch_saves();

}  // namespace tessera
