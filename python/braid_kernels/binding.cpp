// The optional native call of braid_kernels: what a recorded call of an op does (see _replay.py), without Python in between. Built against
// torch's stable ABI of 2.10 (`make binding`), so that one file serves torch 2.10 and later; no symbol of Python or CUDA is used. Autograd
// stays in Python: the stable ABI has no functions for it.
//
// A group holds the records of one op with one set of options. braid_kernels_native::call looks for the record whose inputs are like the
// tensors it is given, makes the outputs and the scratch, fills in the addresses and calls the library. It returns an empty list where no
// record fits or the library refuses; the caller then takes the long way, which says why.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // older headers have it under its old name
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace {

using torch::stable::Tensor;

constexpr size_t MOST_RECORDS = 64;  // of a group; shapes that change all the time keep the memory bounded
constexpr int64_t WORK_ALIGN = 256;

struct Like {
    std::vector<int64_t> slots;  // words of the arguments that take its address
    std::vector<int64_t> sizes, strides;
    int32_t dtype = 0;
    bool present = false;
};

using run_fn = int (*)(void *handle, void *args, void *stream, char *err, size_t err_bytes);

struct Record {
    run_fn run = nullptr;
    void *handle = nullptr;
    int32_t device_type = 0, device_index = 0;
    int64_t work_slot = 0, work_bytes = 0;
    std::vector<uint64_t> words;
    std::vector<Like> inputs, outputs;
};

struct Group {
    std::mutex lock;
    std::vector<std::shared_ptr<const Record>> records;
};

bool fits(const Like &like, const std::optional<Tensor> &t, const Record &r)
{
    if (!t.has_value())
        return !like.present;
    AtenTensorHandle h = t->get();
    int32_t dtype = 0, type = 0, index = 0;
    int64_t rank = 0, *sizes = nullptr;
    bool dense = false;
    if (!like.present || aoti_torch_get_dtype(h, &dtype) != 0 || dtype != like.dtype || aoti_torch_get_dim(h, &rank) != 0 ||
        rank != (int64_t)like.sizes.size() || aoti_torch_get_sizes(h, &sizes) != 0 || aoti_torch_get_device_type(h, &type) != 0 ||
        type != r.device_type || aoti_torch_get_device_index(h, &index) != 0 || aoti_torch_is_contiguous(h, &dense) != 0)
        return false;
    return dense && (r.device_index < 0 || index == r.device_index) &&
           std::memcmp(sizes, like.sizes.data(), (size_t)rank * sizeof *sizes) == 0;
}

bool fits(const Record &r, const std::vector<std::optional<Tensor>> &tensors)
{
    if (tensors.size() != r.inputs.size())
        return false;
    for (size_t i = 0; i < tensors.size(); i++)
        if (!fits(r.inputs[i], tensors[i], r))
            return false;
    return true;
}

std::shared_ptr<const Record> find(Group *g, const std::vector<std::optional<Tensor>> &tensors)
{
    std::lock_guard<std::mutex> held(g->lock);
    for (const auto &r : g->records)
        if (fits(*r, tensors))
            return r;
    return nullptr;
}

Tensor empty(const std::vector<int64_t> &sizes, const std::vector<int64_t> &strides, int32_t dtype, const Record &r)
{
    AtenTensorHandle h = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(), dtype, r.device_type,
                                                           r.device_index < 0 ? 0 : r.device_index, &h));
    return Tensor(h);
}

void fill(std::vector<uint64_t> &words, const Like &like, const Tensor &t, uint64_t *bits)
{
    void *data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t.get(), &data));
    for (int64_t s : like.slots) {
        words[(size_t)s] = (uint64_t)(uintptr_t)data;
        *bits |= (uint64_t)(uintptr_t)data;
    }
}

std::vector<Tensor> call(int64_t group, int64_t stream, std::vector<std::optional<Tensor>> tensors)
{
    char text[256];
    std::shared_ptr<const Record> r = find((Group *)(uintptr_t)group, tensors);
    if (r == nullptr)
        return {};
    std::vector<uint64_t> words = r->words;
    std::vector<Tensor> out;
    std::optional<Tensor> work;
    uint64_t bits = 0;
    for (size_t i = 0; i < tensors.size(); i++)
        if (tensors[i].has_value())
            fill(words, r->inputs[i], *tensors[i], &bits);
    if (bits % 16 != 0)  // other kernels, which may need more scratch
        return {};
    out.reserve(r->outputs.size());
    for (const Like &like : r->outputs) {
        out.push_back(empty(like.sizes, like.strides, like.dtype, *r));
        fill(words, like, out.back(), &bits);
    }
    if (r->work_bytes > 0) {
        void *data = nullptr;
        work = empty({r->work_bytes + WORK_ALIGN}, {1}, aoti_torch_dtype_uint8(), *r);
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(work->get(), &data));
        words[(size_t)r->work_slot] = ((uint64_t)(uintptr_t)data + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN;
        words[(size_t)r->work_slot + 1] = (uint64_t)r->work_bytes;
    }
    if (r->run(r->handle, words.data(), (void *)(uintptr_t)stream, text, sizeof text) != 0)
        return {};
    return out;
}

// The dtypes of braidk.h.
int32_t dtype_of(int64_t braidk)
{
    switch (braidk) {
    case 1: return aoti_torch_dtype_float32();
    case 2: return aoti_torch_dtype_bfloat16();
    case 3: return aoti_torch_dtype_float64();
    case 4: return aoti_torch_dtype_int32();
    case 5: return aoti_torch_dtype_int64();
    case 6: return aoti_torch_dtype_uint8();
    default: return -1;
    }
}

// A tensor as _replay.py writes it: present, dtype, how many slots, slots, rank, sizes. False where it reaches past the end.
bool read_like(const int64_t *n, size_t count, size_t *at, size_t words, Like *out)
{
    if (count - *at < 4)
        return false;
    out->present = n[(*at)++] != 0;
    out->dtype = dtype_of(n[(*at)++]);
    for (std::vector<int64_t> *list : {&out->slots, &out->sizes}) {
        if (*at >= count || n[*at] < 0 || (uint64_t)n[*at] > count - *at - 1)
            return false;
        list->assign(n + *at + 1, n + *at + 1 + n[*at]);
        *at += 1 + (size_t)n[*at];
    }
    for (int64_t s : out->slots)
        if (s < 0 || (uint64_t)s >= words)
            return false;
    int64_t step = 1;
    out->strides.assign(out->sizes.size(), 1);
    for (size_t i = out->sizes.size(); i-- > 0;) {
        out->strides[i] = step;
        step *= out->sizes[i] > 1 ? out->sizes[i] : 1;
    }
    return !out->present || out->dtype >= 0;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void *braid_binding_group(void) { return new (std::nothrow) Group; }

// numbers: run, handle, device (-1: the CPU), slot and bytes of scratch, how many inputs and outputs, then each of them. 0: ok.
__attribute__((visibility("default"))) int braid_binding_add(void *group, const char *args, size_t args_bytes, const int64_t *n, size_t count)
{
    try {
        auto r = std::make_shared<Record>();
        size_t at = 7;
        if (group == nullptr || args_bytes % 8 != 0 || count < at || n[5] < 0 || n[6] < 0)
            return 1;
        r->run = (run_fn)(uintptr_t)n[0];
        r->handle = (void *)(uintptr_t)n[1];
        r->device_index = (int32_t)n[2];
        r->device_type = n[2] < 0 ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
        r->work_slot = n[3];
        r->work_bytes = n[4];
        r->words.resize(args_bytes / 8);
        std::memcpy(r->words.data(), args, args_bytes);
        if (n[3] < 0 || (uint64_t)n[3] + 2 > r->words.size() || n[4] < 0)
            return 1;
        for (int64_t i = 0; i < n[5] + n[6]; i++) {
            Like like;
            if (!read_like(n, count, &at, r->words.size(), &like))
                return 1;
            (i < n[5] ? r->inputs : r->outputs).push_back(std::move(like));
        }
        Group *g = (Group *)group;
        std::lock_guard<std::mutex> held(g->lock);
        if (g->records.size() >= MOST_RECORDS)
            g->records.clear();
        g->records.push_back(std::move(r));
        return 0;
    } catch (...) {
        return 1;
    }
}
}

STABLE_TORCH_LIBRARY(braid_kernels_native, m) { m.def("call(int group, int stream, Tensor?[] tensors) -> Tensor[]"); }
STABLE_TORCH_LIBRARY_IMPL(braid_kernels_native, CompositeImplicitAutograd, m) { m.impl("call", TORCH_BOX(&call)); }
