// The threads are those of the OpenMP runtime that torch has loaded: a second pool would fight it for the cores.
#pragma once
#include <stdint.h>

namespace threads {

inline void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
inline void (*barrier)();
inline int (*number)();

// A counter that threads draw work from.
struct Counter {
    int64_t next = 0;
    int64_t draw() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

// Runs body() on `how_many` threads.
template <class Body>
inline void run(int64_t how_many, Body& body) {
    parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, unsigned(how_many), 0);
}

}  // namespace threads
