// Loops that the compiler makes wide: compiled once for each kind of processor, and chosen when the program starts.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The sanitizers are not ready yet when the choice is made.
#define TESSERA_KERNEL [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define TESSERA_KERNEL
#endif
