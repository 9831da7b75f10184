#pragma once

#include <cuda_runtime.h>

// Segments of K, numerics.md's S: where they begin, and the tree that adds their sums.
namespace qmlp::cuda {

struct Segment {
  int first, count;  // chunks
};
// a / segments, which is 1, 2, 4 or 8.
__device__ __forceinline__ int part_of(int a, int segments) { return a >> (31 - __clz(segments)); }
__device__ __forceinline__ Segment segment_of(int index, int segments, int num_chunks) {
  const int first = part_of(index * num_chunks, segments);
  return {first, part_of((index + 1) * num_chunks, segments) - first};
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

// `partial(s)` are the sums of segment s >= 1, `sum` those of the first.
template <class Partial>
__device__ __forceinline__ float4 sum_segments(float4 sum, int segments, Partial partial) {
  sum = add(sum, partial(1));
  if (segments > 2) sum = add(sum, add(partial(2), partial(3)));
  if (segments > 4) {
    sum = add(sum, add(add(partial(4), partial(5)), add(partial(6), partial(7))));
  }
  return sum;
}

}  // namespace qmlp::cuda
