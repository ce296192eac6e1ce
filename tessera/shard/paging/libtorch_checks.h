// The start-up self-test: shows, before anything is sharded, that the loaded libtorch behaves as Tessera needs it. docs/libtorch.md lists what
// Tessera leans on.
#pragma once

#include <span>
#include <string_view>

namespace tessera {

/// One thing that Tessera leans on.
struct LibtorchCheck {
  std::string_view fault;  // what libtorch does not do if the check fails, as the rest of "libtorch 2.13.0 does not"
  std::string_view needed_for;
  bool (*holds)();  // an exception is a fault, too
};

/// All checks. They need the fallback of install_paging(), take less than a millisecond together, and change no state of the process.
std::span<const LibtorchCheck> libtorch_checks();

/// Throws UsageError if a check fails; the message names all that fail, and the way out.
void expect_sound_libtorch(std::span<const LibtorchCheck> checks = libtorch_checks());

}  // namespace tessera
