// cuBLAS, cuBLASLt and cuDNN, and the handles of cuFFT, cuSPARSE and cuSOLVER.
//
// Only functions that return something are here. All others count as one launch or as a setter; see
// virtual_gpu_unimplemented, which reads the stream from where the handles below store it.

// The headers of the number types need CCCL, and only their names are used.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half {
  short bits;
};
struct __half2 {
  short low, high;
};
struct __nv_bfloat16 {
  short bits;
};

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <cudnn_backend.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "state.h"

using namespace virtual_gpu;

// ---- cuBLAS

struct BlasHandle {
  int math_mode;
  int pointer_mode;
  void* unused;
  cudaStream_t stream;
};
static_assert(offsetof(BlasHandle, stream) == 2 * sizeof(void*), "virtual_gpu_unimplemented reads the stream at index 2");

static BlasHandle* blas(cublasHandle_t handle) { return (BlasHandle*)handle; }

#undef cublasCreate

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  if (check_unsafe("cublasCreate, which allocates")) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = cublasHandle_t(new BlasHandle{});
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete blas(handle);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  blas(handle)->math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = cublasMath_t(blas(handle)->math_mode);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  blas(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = cublasPointerMode_t(blas(handle)->pointer_mode);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  blas(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = blas(handle)->stream;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT const char* cublasGetStatusString(cublasStatus_t) { return "an error of the virtual GPU's cuBLAS"; }
EXPORT const char* cublasGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS"; }

// ---- cuBLASLt: descriptors are blank, every product has one algorithm without a workspace

template <class T>
static cublasStatus_t new_blank(T* descriptor) {
  *descriptor = T(calloc(1, 512));
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
static cublasStatus_t free_blank(T descriptor) {
  free((void*)descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return new_blank(handle); }
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return free_blank(handle); }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor, cublasComputeType_t, cudaDataType_t) {
  return new_blank(descriptor);
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) { return free_blank(descriptor); }
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t, uint64_t, int64_t) {
  return new_blank(layout);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return free_blank(layout); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) { return new_blank(preference); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return free_blank(preference); }

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatmulPreference_t, int requested,
                                                     cublasLtMatmulHeuristicResult_t results[], int* count) {
  *count = requested > 0;
  if (*count) {
    memset(&results[0], 0, sizeof results[0]);
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1;
  }
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*,
                                              cublasLtMatmulHeuristicResult_t* result) {
  memset(result, 0, sizeof *result);
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t,
                                                           void* value, size_t bytes, size_t* written) {
  if (value) memset(value, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
                                     const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*,
                                     cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  return library_call("cublasLtMatmul", stream) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

// ---- cuDNN's older functions

struct DnnHandle {
  cudaStream_t stream;  // virtual_gpu_unimplemented reads it at index 0
};

EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
EXPORT cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
EXPORT const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status ? "an error of the virtual GPU's cuDNN" : "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char* message, size_t length) {
  if (length) snprintf(message, length, "not supported by the virtual GPU");
}
EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  if (check_unsafe("cudnnCreate, which allocates")) return CUDNN_STATUS_NOT_INITIALIZED;
  *handle = cudnnHandle_t(new DnnHandle{});
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete (DnnHandle*)handle;
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  ((DnnHandle*)handle)->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = ((DnnHandle*)handle)->stream;
  return CUDNN_STATUS_SUCCESS;
}

#define DESCRIPTOR(NAME)                                                       \
  EXPORT cudnnStatus_t cudnnCreate##NAME(cudnn##NAME##_t* descriptor) {        \
    *descriptor = cudnn##NAME##_t(calloc(1, 4096));                            \
    return CUDNN_STATUS_SUCCESS;                                               \
  }                                                                            \
  EXPORT cudnnStatus_t cudnnDestroy##NAME(cudnn##NAME##_t descriptor) {        \
    free((void*)descriptor);                                                   \
    return CUDNN_STATUS_SUCCESS;                                               \
  }
DESCRIPTOR(TensorDescriptor)
DESCRIPTOR(FilterDescriptor)
DESCRIPTOR(ConvolutionDescriptor)
DESCRIPTOR(ActivationDescriptor)
DESCRIPTOR(PoolingDescriptor)
DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(RNNDescriptor)
DESCRIPTOR(RNNDataDescriptor)
DESCRIPTOR(SpatialTransformerDescriptor)

#define NO_WORKSPACE(NAME, ...)                             \
  EXPORT cudnnStatus_t NAME(__VA_ARGS__, size_t* bytes) {   \
    *bytes = 0;                                             \
    return CUDNN_STATUS_SUCCESS;                            \
  }
NO_WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize, cudnnHandle_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
             cudnnConvolutionDescriptor_t, cudnnTensorDescriptor_t, cudnnConvolutionFwdAlgo_t)
NO_WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize, cudnnHandle_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
             cudnnConvolutionDescriptor_t, cudnnTensorDescriptor_t, cudnnConvolutionBwdDataAlgo_t)
NO_WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize, cudnnHandle_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
             cudnnConvolutionDescriptor_t, cudnnFilterDescriptor_t, cudnnConvolutionBwdFilterAlgo_t)
NO_WORKSPACE(cudnnDropoutGetStatesSize, cudnnHandle_t)

#define CONVOLUTION_ALGORITHM(NAME, INPUT, WEIGHT, OUTPUT, RESULT, ALGORITHM)                                            \
  EXPORT cudnnStatus_t NAME(cudnnHandle_t, const INPUT, const WEIGHT, const cudnnConvolutionDescriptor_t, const OUTPUT,  \
                            int requested, int* count, RESULT* results) {                                                \
    *count = requested > 0;                                                                                              \
    if (*count) {                                                                                                        \
      memset(results, 0, sizeof *results);                                                                               \
      results->algo = ALGORITHM;                                                                                         \
      results->time = 1e-3f;                                                                                             \
    }                                                                                                                    \
    return CUDNN_STATUS_SUCCESS;                                                                                         \
  }
CONVOLUTION_ALGORITHM(cudnnGetConvolutionForwardAlgorithm_v7, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
                      cudnnTensorDescriptor_t, cudnnConvolutionFwdAlgoPerf_t, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM)
CONVOLUTION_ALGORITHM(cudnnGetConvolutionBackwardDataAlgorithm_v7, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
                      cudnnTensorDescriptor_t, cudnnConvolutionBwdDataAlgoPerf_t, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1)
CONVOLUTION_ALGORITHM(cudnnGetConvolutionBackwardFilterAlgorithm_v7, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
                      cudnnFilterDescriptor_t, cudnnConvolutionBwdFilterAlgoPerf_t, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1)

// ---- cuDNN's graph functions: descriptors store their attributes, heuristics offer one engine, a plan is one launch

struct Attribute {
  std::vector<char> data;
  int64_t count;
};

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, Attribute> attributes;
  // From the tensors to the plan, since a descriptor may be gone when the plan runs:
  const char* operation = "cudnn[graph]";
  int64_t transposed_bytes = 0;
};

static const char* operation_name(cudnnBackendDescriptorType_t type) {
  switch (type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return "cudnn[convolution]";
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return "cudnn[convolution backward, input]";
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return "cudnn[convolution backward, weight]";
    default:
      return "cudnn[graph]";
  }
}

static int64_t bytes_of_type(int type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64:
      return 8;
    case CUDNN_DATA_FLOAT:
    case CUDNN_DATA_INT32:
      return 4;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    default:
      return 1;
  }
}

// Bytes of an image tensor that is not channels-last, which cuDNN would transpose for its tensor-core kernels.
static int64_t bytes_to_transpose(Descriptor* tensor) {
  auto& attributes = tensor->attributes;
  if (!attributes.count(CUDNN_ATTR_TENSOR_DIMENSIONS) || !attributes.count(CUDNN_ATTR_TENSOR_STRIDES)) return 0;
  const Attribute& dimensions = attributes[CUDNN_ATTR_TENSOR_DIMENSIONS];
  auto* sizes = (const int64_t*)dimensions.data.data();
  auto* strides = (const int64_t*)attributes[CUDNN_ATTR_TENSOR_STRIDES].data.data();
  if (dimensions.count < 3 || strides[1] == 1) return 0;
  auto type = attributes.find(CUDNN_ATTR_TENSOR_DATA_TYPE);
  int64_t bytes = type == attributes.end() ? 4 : bytes_of_type(*(const int*)type->second.data.data());
  int64_t pixels = 1;
  for (int64_t i = 0; i < dimensions.count; i++) {
    bytes *= sizes[i];
    if (i > 1) pixels *= sizes[i];
  }
  return pixels == 1 ? 0 : bytes;
}

// cuDNN's real workspaces are unknown; VIRTUAL_GPU_CUDNN_WORKSPACE is a factor on the bytes above, 0 by default.
static int64_t workspace_of(const Descriptor* plan) {
  static const double factor = getenv("VIRTUAL_GPU_CUDNN_WORKSPACE") ? atof(getenv("VIRTUAL_GPU_CUDNN_WORKSPACE")) : 0;
  return int64_t(factor * double(plan->transposed_bytes));
}

static void inherit(Descriptor* to, const Descriptor* from) {
  to->operation = from->operation;
  to->transposed_bytes = from->transposed_bytes;
}

static size_t bytes_of_attribute(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_FRACTION:
      return 16;
    default:
      return 4;
  }
}

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
  *descriptor = cudnnBackendDescriptor_t(new Descriptor{type, {}});
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete (Descriptor*)descriptor;
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  auto* descriptor = (Descriptor*)handle;
  Attribute attribute{{}, count};
  if (count > 0 && values) attribute.data.assign((const char*)values, (const char*)values + count * bytes_of_attribute(type));
  descriptor->attributes[name] = attribute;
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR || count != 1 || !values) return CUDNN_STATUS_SUCCESS;
  auto* member = *(Descriptor* const*)values;
  if (member->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) {
    descriptor->transposed_bytes += bytes_to_transpose(member);
  } else if (name == CUDNN_ATTR_OPERATIONGRAPH_OPS) {
    descriptor->operation = operation_name(member->type);
    descriptor->transposed_bytes = member->transposed_bytes;
  } else if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH || name == CUDNN_ATTR_ENGINE_OPERATION_GRAPH ||
             name == CUDNN_ATTR_ENGINECFG_ENGINE || name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) {
    inherit(descriptor, member);
  }
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t requested, int64_t* count, void* values) {
  auto* descriptor = (Descriptor*)handle;
  int64_t ignored;
  if (!count) count = &ignored;
  bool writes = values && requested > 0;
  auto answer = [&](int64_t number) {
    *count = 1;
    if (writes) *(int64_t*)values = number;
    return CUDNN_STATUS_SUCCESS;
  };
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE:
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
      *count = 1;
      if (writes && *(Descriptor**)values) inherit(*(Descriptor**)values, descriptor);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
#if CUDNN_VERSION >= 90200
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
#endif
      return answer(workspace_of(descriptor));
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      return answer(1);
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      if (!descriptor->attributes.count(name)) return answer(0);
      break;
    default:
      break;
  }
  auto stored = descriptor->attributes.find(name);
  *count = stored == descriptor->attributes.end() ? 0 : stored->second.count;
  int64_t copied = *count < requested ? *count : requested;
  if (values && copied > 0) memcpy(values, stored->second.data.data(), copied * bytes_of_attribute(type));
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t) {
  int error = library_call(((Descriptor*)plan)->operation, ((DnnHandle*)handle)->stream);
  return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

// ---- handles of other libraries, which PyTorch creates even where it does not compute with them

EXPORT int cusparseCreate(void** handle) {
  *handle = calloc(1, 4096);
  return 0;
}
EXPORT int cusparseGetVersion(void*, int* version) {
  *version = 12600;
  return 0;
}
EXPORT int cusparseLtInit(void*) { return 0; }
EXPORT int cusolverDnCreate(void** handle) {
  *handle = calloc(1, 4096);
  return 0;
}
EXPORT int cufftCreate(int* plan) {
  static std::atomic<int> last{0};
  *plan = ++last;
  return 0;
}
EXPORT int cufftXtMakePlanMany(int, int, long long*, long long*, long long, long long, int, long long*, long long, long long, int,
                               long long, size_t* workspace, int) {
  *workspace = 0;
  return 0;
}
