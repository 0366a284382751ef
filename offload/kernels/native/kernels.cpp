// The processor's kernels: one translation unit, compiled once for each instruction set (setup.py).
#include <stdint.h>

#include "threads.h"

#define KERNEL extern "C" __attribute__((visibility("default")))

// Changes with every change of a structure or a function below, together with ABI in __init__.py.
KERNEL int abi() { return 1; }

KERNEL void bind(void* parallel, void* barrier, void* number, void* count) {
    threads::parallel = reinterpret_cast<decltype(threads::parallel)>(parallel);
    threads::barrier = reinterpret_cast<decltype(threads::barrier)>(barrier);
    threads::number = reinterpret_cast<decltype(threads::number)>(number);
    threads::count = reinterpret_cast<decltype(threads::count)>(count);
}

// sums[t] = the sum of the t-th of `how_many` parts of x [count], in fp64.
KERNEL void sum_parts(const float* x, int64_t count, double* sums, int64_t how_many) {
    auto body = [&] {
        for (int64_t part = threads::number(); part < how_many; part += threads::count()) {
            double sum = 0;
            for (int64_t i = part * count / how_many; i < (part + 1) * count / how_many; ++i) sum += double(x[i]);
            sums[part] = sum;
        }
    };
    threads::run(how_many, body);
}
