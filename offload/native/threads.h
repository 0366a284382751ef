// A team of threads that share the items of one call at a time.
//
// Nobody waits for a thread that has no item in hand: what one thread does not draw another does, so a thread that the
// system does not run, because other programs want the CPU, delays nothing. How long a thread spins before it
// sleeps follows how long it was kept from running lately: on an idle machine it spins, since waking takes longer than
// most waits; on a busy one a spinning thread takes the time of the thread that it waits for.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace threads {

enum class Waiting : int { adaptive, asleep, spinning };

constexpr int MOST_PHASES = 32;
constexpr int64_t DRAWS = 3;              // of each thread of what is left
constexpr int64_t SPIN_NS = 2'000'000;    // on an idle machine: longer than what Python does between two calls
constexpr int64_t LOOK_NS = 10'000'000;   // how often a thread looks how long it was kept from running
constexpr int64_t CROWDED_NS = 100'000'000;  // for so long it then does not spin
constexpr int64_t FOREVER = INT64_MAX;
constexpr int64_t CROWDED_SHARE = 50;     // of the time since it looked, one part in so many

inline Waiting waiting = Waiting::adaptive;
inline int64_t crowded_until = 0;

inline int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

template <class T>
inline T read(const T& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }
template <class T>
inline void write(T& word, T value) { __atomic_store_n(&word, value, __ATOMIC_SEQ_CST); }

// Nanoseconds in which this thread was ready to run and no CPU ran it; -1 where the system does not say.
inline int64_t kept_waiting() {
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    char text[96] = {};
    const auto size = ::read(file, text, sizeof text - 1);
    close(file);
    const char* second = size > 0 ? strchr(text, ' ') : nullptr;
    return second ? strtoll(second, nullptr, 10) : -1;
}

// How long this thread may spin now.
inline int64_t patience(int64_t at) {
    static thread_local int64_t looked = 0, delay = -1;
    if (waiting != Waiting::adaptive) return waiting == Waiting::asleep ? 0 : SPIN_NS;
    if (at - looked > LOOK_NS) {
        const int64_t total = kept_waiting();
        if (delay >= 0 && (total - delay) * CROWDED_SHARE > at - looked) write(crowded_until, at + CROWDED_NS);
        looked = at, delay = total;
    }
    return at < read(crowded_until) ? 0 : SPIN_NS;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

// Whose threads wait for a word: this process's, or those of every process that has mapped its memory.
enum class Reach : int { process = FUTEX_PRIVATE_FLAG, machine = 0 };

// A word that threads wait for: they spin, then sleep until who changes it wakes them.
template <Reach reach>
struct Signal {
    uint64_t word = 0;
    int32_t sleepers = 0;

    // Until done(word); with a limit also until so many nanoseconds have passed or the system has a signal for this
    // thread. The low half of the word is what changes.
    template <class Done>
    uint64_t wait(Done&& done, int64_t limit = 0) {
        uint64_t seen = read(word);
        if (done(seen)) return seen;
        const int64_t start = now(), end = start + patience(start);
        for (int i = 1; start < end && (i % 32 || now() < end); i++) {
            i % 32 ? relax() : (void)sched_yield();  // whoever else is ready on this CPU goes first
            if (done(seen = read(word))) return seen;
        }
        __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
        while (!done(seen = read(word)))
            if (!sleep(uint32_t(seen), limit ? start + limit - now() : FOREVER) && limit) break;
        __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
        return seen;
    }

    void wake() {
        if (read(sleepers)) syscall(SYS_futex, &word, FUTEX_WAKE | int(reach), INT_MAX, nullptr, nullptr, 0);
    }

  private:
    // Until the low half is no longer what was seen. False if the time was over, or a signal of the system came first.
    bool sleep(uint32_t seen, int64_t left) {
        if (left <= 0) return false;
        const timespec time{left / 1'000'000'000, left % 1'000'000'000};
        return !syscall(SYS_futex, &word, FUTEX_WAIT | int(reach), seen, &time, nullptr, 0) || errno == EAGAIN;
    }
};
using Own = Signal<Reach::process>;
using Shared = Signal<Reach::machine>;

// Items of one part of a call: in the upper half of each word the number of the call, in the lower one how many are
// left, to be drawn and to be done.
struct Phase {
    alignas(64) uint64_t undrawn = 0;
    alignas(64) Own undone;

    void open(uint32_t call, int64_t count) {
        write(undone.word, uint64_t(call) << 32 | uint64_t(count));
        write(undrawn, uint64_t(call) << 32 | uint64_t(count));
    }

    // Takes `taken` items of the call, a share of those left, so that threads draw seldom and end together: how many
    // were left with them, 0 if none is. A thread that comes too late takes none of a later call.
    int64_t draw(uint32_t call, int64_t threads, int64_t& taken) {
        uint64_t seen = read(undrawn);
        while (seen >> 32 == call && uint32_t(seen)) {
            taken = (uint32_t(seen) + DRAWS * threads - 1) / (DRAWS * threads);
            if (__atomic_compare_exchange_n(&undrawn, &seen, seen - uint64_t(taken), true, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST))
                return uint32_t(seen);
        }
        return 0;
    }

    void did(int64_t count) {
        if (uint32_t(__atomic_sub_fetch(&undone.word, uint64_t(count), __ATOMIC_SEQ_CST)) == 0) undone.wake();
    }

    // Waits for the items that others have in hand. False if the call is over.
    bool finish(uint32_t call) {
        return undone.wait([&](uint64_t seen) { return seen >> 32 != call || !uint32_t(seen); }) >> 32 == call;
    }
};

// What a thread does with a call: drive<Local, Body>.
using Drive = void (*)(uint32_t call, int64_t threads, int number, const void* body);

// The one call at a time. What is not atomic is written before the call is opened and stays until its last item is
// done; who has drawn an item may read it.
struct Team {
    Phase phases[MOST_PHASES];
    int64_t counts[MOST_PHASES] = {};
    Drive drive = nullptr;
    const void* body = nullptr;
    alignas(64) Own calls;  // in the upper half how many threads may take part, in the lower one the call's number
    int busy = 0;              // a thread is calling
    int num_helpers = 0;
};
inline constinit Team team;

// body(phase, item, local, number) for the items that this thread draws of each phase, once those of the phase before
// are all done. Until it has drawn one it touches nothing of the call but atomic words. The phase after the last is not
// one of this call.
template <class Local, class Body>
void drive(uint32_t call, int64_t threads, int number, const void* body) {
    Local local;
    for (int p = 0; p < MOST_PHASES; p++) {
        Phase& phase = team.phases[p];
        int64_t done = 0, taken;
        for (int64_t left; (left = phase.draw(call, threads, taken)); done += taken)
            for (int64_t item = team.counts[p] - left; item < team.counts[p] - left + taken; item++)
                (*static_cast<const Body*>(body))(p, item, local, number);
        if (done) phase.did(done);
        if (!phase.finish(call)) return;
    }
}

// A helper's life. Between calls it waits; number: from 1 on, the caller is 0.
inline void* help(void* argument) {
    const int number = int(reinterpret_cast<intptr_t>(argument));
    for (uint32_t last = 0;;) {
        const uint64_t seen = team.calls.wait([&](uint64_t word) { return uint32_t(word) != last; });
        last = uint32_t(seen);
        if (number >= int64_t(seen >> 32)) continue;
        const Drive drive = read(team.drive);
        drive(last, int64_t(seen >> 32), number, read(team.body));
    }
    return nullptr;
}

// Starts helpers until there are `count`. They leave signals to the program's own threads. Where no more threads are to
// be had, the work is done by those that are there.
inline void recruit(int64_t count) {
    if (team.num_helpers >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; team.num_helpers < count; team.num_helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, reinterpret_cast<void*>(intptr_t(team.num_helpers + 1)))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// body(phase, item, local, number) for counts[phase] items of each of `num_phases` phases, each phase after the one
// before, on up to how_many threads, numbered from 0 on. local: a thread's own, of its time in this call; its
// constructor may look at nothing of the caller's.
template <class Local, class Body>
void in_phases(int64_t how_many, const int64_t* counts, int num_phases, const Body& body) {
    int idle = 0;
    if (how_many <= 1 || !__atomic_compare_exchange_n(&team.busy, &idle, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        Local local;
        for (int p = 0; p < num_phases; p++)
            for (int64_t item = 0; item < counts[p]; item++) body(p, item, local, 0);
        return;
    }
    recruit(how_many - 1);
    const uint32_t call = uint32_t(team.calls.word) + 1;
    write(team.drive, Drive(drive<Local, Body>));
    write(team.body, static_cast<const void*>(&body));
    for (int p = 0; p < num_phases; p++) team.counts[p] = counts[p];
    for (int p = num_phases; p-- > 0;) team.phases[p].open(call, counts[p]);
    write(team.calls.word, uint64_t(how_many) << 32 | call);
    team.calls.wake();
    drive<Local, Body>(call, how_many, 0, &body);
    write(team.busy, 0);
}

// body(item) for `count` items.
template <class Body>
void each(int64_t how_many, int64_t count, const Body& body) {
    struct None {};
    in_phases<None>(how_many, &count, 1, [&](int, int64_t item, None&, int) { body(item); });
}

}  // namespace threads
