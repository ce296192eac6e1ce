// Marks loops that the compiler vectorizes once for each kind of processor; the program picks a version when it starts.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// Sanitizers are excluded, because they are not initialised yet when the version is picked.
#define TESSERA_KERNEL [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define TESSERA_KERNEL
#endif
