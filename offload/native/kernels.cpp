#include "attention.h"
#include "choosing.h"
#include "chosen.h"
#include "convolution.h"
#include "delta.h"
#include "experts.h"
#include "kv_residuals.h"
#include "packed.h"
#include "products.h"
#include "residuals.h"
#include "rotation.h"

#define KERNEL extern "C" __attribute__((visibility("default")))

namespace {
enum class Dtype : int64_t { bf16, fp16, fp32 };

// f.operator()<E>() for the element type of `dtype`.
template <class F>
void with(Dtype dtype, F&& f) {
    if (dtype == Dtype::bf16) f.template operator()<Bf16>();
    else if (dtype == Dtype::fp16) f.template operator()<Fp16>();
    else f.template operator()<Fp32>();
}
}  // namespace

// Its thousands change with every change of a structure or a function below, and of a row of stored_forms.h.
KERNEL int abi() { return 45000 + stored::NUM_FORMS; }

// Whether the system lets this process use the instructions. To be asked first.
KERNEL int permitted() { return tiles::permitted(); }

KERNEL void wait_by(threads::Waiting waiting) { threads::waiting = waiting; }

// A count in memory that processes share is now `value`: wakes those that wait for it.
KERNEL void post(threads::Shared* count, uint64_t value) {
    threads::write(count->word, value);
    count->wake();
}

// Whether a count is at least `value`, within so many nanoseconds, and before the system has a signal for this thread.
KERNEL int await_count(threads::Shared* count, uint64_t value, int64_t nanoseconds) {
    const auto reached = [&](uint64_t seen) { return seen >= value; };
    return reached(count->wait(reached, nanoseconds));
}

// out: the sum of `count` parts of as many numbers, added in fp32 in their order and rounded once.
KERNEL void add_parts(Dtype dtype, const void* const* parts, int64_t count, void* out, int64_t numbers) {
    with(dtype, [&]<class E>() {
        using Element = typename E::element;
        const auto at = [&](int64_t part, int64_t i) { return static_cast<const Element*>(parts[part]) + i; };
        Element* const to = static_cast<Element*>(out);
        int64_t i = 0;
        for (; i + W <= numbers; i += W) {
            f32 total = E::read(at(0, i));
            for (int64_t part = 1; part < count; part++) total += E::read(at(part, i));
            E::write(to + i, E::rounded(total));
        }
        for (; i < numbers; i++) {
            float total = E::widen_one(*at(0, i));
            for (int64_t part = 1; part < count; part++) total += E::widen_one(*at(part, i));
            to[i] = E::round_one(total);
        }
    });
}

KERNEL void run_products(Dtype dtype, const Product* steps, int64_t count, int64_t rows, int64_t how_many) {
    with(dtype, [&]<class E>() { products::run<E>(steps, count, rows, how_many); });
}

KERNEL void encode(Dtype dtype, const void* weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* matrix,
                   int64_t how_many) {
    with(dtype, [&]<class E>() {
        codes::encode<E>(static_cast<const typename E::element*>(weight), outputs, inputs, bits, matrix, how_many);
    });
}

KERNEL void decode_rows(Dtype dtype, const stored::Matrix* matrix, int64_t outputs, int64_t inputs, void* out,
                        int64_t how_many) {
    with(dtype, [&]<class E>() {
        stored::decode<E>(*matrix, outputs, inputs, static_cast<typename E::element*>(out), how_many);
    });
}

// A row of the table of forms, from 1 on; null behind the last one.
KERNEL const stored::Form* form(int64_t number) { return number > stored::NUM_FORMS ? nullptr : &stored::FORMS[number - 1]; }

KERNEL void encode_kv(Dtype dtype, const Encoding* e, int64_t how_many) {
    with(dtype, [&]<class E>() { kv_codes::encode<E>(*e, how_many); });
}

KERNEL void pack(const uint16_t* const* blocks, uint8_t* const* to, int64_t count, int64_t* sizes,
                 const packed::Shape* shape, int64_t how_many) {
    packed::pack_all(blocks, to, count, sizes, *shape, how_many);
}

KERNEL void unpack(const packed::Part* parts, int64_t count, const packed::Shape* shape, int64_t how_many) {
    packed::unpack_all(parts, count, *shape, how_many);
}

KERNEL int count_residual(const Residual* r, int64_t how_many) { return residuals::count_all(*r, how_many); }

KERNEL void split_residual(const Residual* r, int64_t how_many) {
    residuals::by_group(*r, how_many, [&](int64_t group) { residuals::split(*r, group); });
}

KERNEL void restore_residual(const Residual* r, int64_t how_many) {
    residuals::by_group(*r, how_many, [&](int64_t group) { residuals::restore(*r, group); });
}

KERNEL void split_off_kv(const kv_residuals::Block* blocks, int64_t count, int64_t* sizes,
                         const kv_residuals::Shape* shape, kv_residuals::Order order, int64_t most,
                         int64_t how_many) {
    kv_residuals::split_off_all(blocks, count, sizes, *shape, order, most, how_many);
}

KERNEL void restore_kv(const kv_residuals::Part* parts, int64_t count, const kv_residuals::Shape* shape,
                       kv_residuals::Order order, int64_t how_many) {
    kv_residuals::restore_all(parts, count, *shape, order, how_many);
}

KERNEL int64_t widened_room(Dtype dtype, int64_t inputs) {
    int64_t room = 0;
    with(dtype, [&]<class E>() { room = padded<E>(int(inputs)); });
    return room;
}

KERNEL int64_t scratch_room(Dtype dtype, int64_t dim, int64_t folded, int64_t count, int64_t joined) {
    int64_t room = 0;
    with(dtype, [&]<class E>() { room = attention::scratch_room<E>(dim, folded, count, joined != 0); });
    return room;
}

KERNEL void attend_runs(Dtype dtype, const Attention* a, const Run* runs, int64_t count, float* scratch, int64_t room,
                        int64_t is_last, int64_t how_many) {
    with(dtype, [&]<class E>() { attention::attend<E>(*a, runs, count, scratch, room, is_last != 0, how_many); });
}

KERNEL int64_t chosen_room(Dtype dtype, int64_t dim, int64_t group, int64_t span, int64_t joined) {
    int64_t room = 0;
    with(dtype, [&]<class E>() { room = chosen::scratch_room<E>(dim, group, span, joined != 0); });
    return room;
}

KERNEL void attend_chosen(Dtype dtype, const Attention* a, const Chosen* c, float* scratch, int64_t room,
                          int64_t how_many) {
    with(dtype, [&]<class E>() { chosen::attend<E>(*a, *c, scratch, room, how_many); });
}

KERNEL void choose(Dtype dtype, const Choosing* c, int64_t how_many) {
    with(dtype, [&]<class E>() { choosing::run<E>(*c, how_many); });
}

KERNEL void merge_runs(Dtype dtype, const Attention* a, int64_t how_many) {
    with(dtype, [&]<class E>() { attention::merge<E>(*a, how_many); });
}

KERNEL void append_rows(Dtype dtype, const Rotation* r) {
    with(dtype, [&]<class E>() { rotation::append_rows<E>(*r); });
}

KERNEL void norm_heads(Dtype dtype, const HeadNorm* parts, int64_t count, int64_t rows) {
    with(dtype, [&]<class E>() { rotation::norm_heads<E>(parts, count, rows); });
}

KERNEL int64_t delta_room(const Delta* d) { return delta::room(*d); }

KERNEL void run_delta(Dtype dtype, const Delta* d, int64_t how_many) {
    with(dtype, [&]<class E>() { delta::run<E>(*d, how_many); });
}

KERNEL void run_convolution(Dtype dtype, const Convolution* c, int64_t how_many) {
    with(dtype, [&]<class E>() { convolution::run<E>(*c, how_many); });
}

KERNEL void route(Dtype dtype, const Experts* e, int64_t rows, int64_t how_many) {
    with(dtype, [&]<class E>() { experts::route<E>(*e, rows, how_many); });
}

KERNEL void run_experts(Dtype dtype, const Experts* e, int64_t how_many) {
    with(dtype, [&]<class E>() { experts::run<E>(*e, how_many); });
}

// The same of a mixture whose experts are all in one bank.
KERNEL void run_mixture(Dtype dtype, const Experts* e, int64_t rows, int64_t how_many) {
    with(dtype, [&]<class E>() {
        experts::route<E>(*e, rows, how_many);
        experts::run<E>(*e, how_many);
        experts::sum<E>(*e, rows, how_many);
    });
}

KERNEL int64_t arrange_share(const Experts* e, int64_t rows) { return experts::arrange_share(*e, rows); }

KERNEL void gather_share(Dtype dtype, const Experts* e, int64_t rows, int64_t* pairs, int64_t how_many) {
    with(dtype, [&]<class E>() { experts::gather<E>(*e, rows, pairs, how_many); });
}

KERNEL void run_many_experts(Dtype dtype, const Experts* e, int64_t rows, int64_t how_many) {
    with(dtype, [&]<class E>() { experts::run_many<E>(*e, rows, how_many); });
}

KERNEL void sum_experts(Dtype dtype, const Experts* e, int64_t rows, int64_t how_many) {
    with(dtype, [&]<class E>() { experts::sum<E>(*e, rows, how_many); });
}
