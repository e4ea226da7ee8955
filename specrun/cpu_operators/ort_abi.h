// The part of ONNX Runtime's C interface that the operators use, declared by its binary layout: no package has its
// headers. The table of functions only grows, and a function keeps its place; struct CustomOp is version 17's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 17;  // onnxruntime 1.17 and all later ones.

struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct SessionOptions;
struct Domain;

enum class Type : int { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kUint16 = 4, kInt64 = 7, kFloat16 = 10 };
enum class Presence : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
constexpr int kInvalidArgument = 2, kRuntimeException = 6;

struct ApiBase {
    const void* const* (*get_api)(uint32_t version);
    const char* (*get_version)();
};

// A function of the table, by its place in it.
template <int kPlace, typename Result, typename... Arguments>
struct Function {
    Result operator()(const void* const* table, Arguments... arguments) const {
        return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(table[kPlace]))(arguments...);
    }
};

constexpr Function<0, Status*, int, const char*> create_status;
constexpr Function<26, Status*, const char*, Domain**> create_domain;
constexpr Function<27, Status*, Domain*, const struct CustomOp*> add_to_domain;
constexpr Function<28, Status*, SessionOptions*, Domain*> add_domain;
constexpr Function<51, Status*, Value*, void**> tensor_data;
constexpr Function<60, Status*, const TensorInfo*, Type*> element_type;
constexpr Function<61, Status*, const TensorInfo*, size_t*> count_dimensions;
constexpr Function<62, Status*, const TensorInfo*, int64_t*, size_t> dimensions;
constexpr Function<64, Status*, const TensorInfo*, size_t*> count_elements;
constexpr Function<65, Status*, const Value*, TensorInfo**> tensor_info;
constexpr Function<85, Status*, const KernelInfo*, const char*, float*> float_attribute;
constexpr Function<86, Status*, const KernelInfo*, const char*, int64_t*> integer_attribute;
constexpr Function<87, Status*, const KernelInfo*, const char*, char*, size_t*> string_attribute;
constexpr Function<88, Status*, const KernelContext*, size_t*> count_inputs;
constexpr Function<89, Status*, const KernelContext*, size_t*> count_outputs;
constexpr Function<90, Status*, const KernelContext*, size_t, const Value**> input;
constexpr Function<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**> output;
constexpr Function<93, void, Status*> release_status;
constexpr Function<99, void, TensorInfo*> release_tensor_info;
constexpr Function<163, Status*, const KernelInfo*, const char*, int64_t*, size_t*> integers_attribute;
constexpr Function<230, Status*, const KernelInfo*, size_t*> count_inputs_of_node;
constexpr Function<231, Status*, const KernelInfo*, size_t*> count_outputs_of_node;
constexpr Function<249, Status*, const KernelInfo*, size_t, int*, const Value**> constant_input;
constexpr Function<274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*> parallel_for;

// What an operator is, for ONNX Runtime. A null function is not called, or stands for what is usual.
struct CustomOp {
    uint32_t version;
    void* (*create_kernel)(const CustomOp*, const void* const* api, const KernelInfo*);
    const char* (*name)(const CustomOp*);
    const char* (*provider)(const CustomOp*);
    Type (*input_type)(const CustomOp*, size_t);
    size_t (*count_inputs)(const CustomOp*);
    Type (*output_type)(const CustomOp*, size_t);
    size_t (*count_outputs)(const CustomOp*);
    void (*compute)(void* kernel, KernelContext*);
    void (*destroy_kernel)(void* kernel);
    Presence (*input_presence)(const CustomOp*, size_t);
    Presence (*output_presence)(const CustomOp*, size_t);
    int (*input_memory)(const CustomOp*, size_t);
    int (*fewest_variadic_inputs)(const CustomOp*);
    int (*variadic_inputs_are_alike)(const CustomOp*);
    int (*fewest_variadic_outputs)(const CustomOp*);
    int (*variadic_outputs_are_alike)(const CustomOp*);
    Status* (*create_kernel_or_fail)(const CustomOp*, const void* const* api, const KernelInfo*, void** kernel);
    Status* (*compute_or_fail)(void* kernel, KernelContext*);
    Status* (*infer_shapes)(const CustomOp*, ShapeContext*);
    int (*first_version)(const CustomOp*);
    int (*last_version)(const CustomOp*);
    // Version 18 added four; onnxruntime does not look at them where ``version`` is older.
    void* later[4];
};

}  // namespace ort
