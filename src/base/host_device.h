#pragma once

// QMLP_HOST_DEVICE: in front of a function that GPU code calls too. QMLP_UNROLL: in front of a loop
// that GPU code needs without its counter.
#ifdef __CUDACC__
#define QMLP_HOST_DEVICE __host__ __device__
#define QMLP_UNROLL _Pragma("unroll")
#else
#define QMLP_HOST_DEVICE
#define QMLP_UNROLL
#endif
