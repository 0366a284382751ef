// The threads are those of the OpenMP runtime that torch has loaded: a second pool would fight it for the cores.
#pragma once

namespace threads {

inline void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
inline void (*barrier)();
inline int (*number)();
inline int (*count)();

// Runs body() on at most `how_many` threads; count() is how many there are.
template <class Body>
inline void run(int64_t how_many, Body& body) {
    parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, unsigned(how_many), 0);
}

}  // namespace threads
