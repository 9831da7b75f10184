#!/usr/bin/env python3
"""Writes src/cuda/device/wgmma.cuh: wgmma.m64nNk16 with operand A in registers, for the widths in use."""

WIDTHS = (16, 32, 64, 128, 256)
HIGH = "0x40000040"  # of a descriptor: 128-byte swizzle, 1024 bytes from eight rows to the next


def function(n: int, dtype: str, tag: str) -> str:
    count = n // 2
    regs = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""template <>
__device__ __forceinline__ void wgmma<{tag}, {n}>(float (&d)[{count}], std::uint32_t a0, std::uint32_t a1,
    std::uint32_t a2, std::uint32_t a3, std::uint32_t b, int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\n.reg .b64 b;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
      "mov.b64 b, {{%{count + 4}, {HIGH}}};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{regs}}}, "
      "{{{a}}}, b, p, 1, 1, 0;\\n}}\\n"
      : {outs}
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate));
}}
"""


def main() -> None:
    print("#pragma once\n\n// Written by tools/gen_wgmma.py.\n// clang-format off\n")
    print('#include "cuda/device/decode.cuh"\n\nnamespace qmlp::cuda {\n')
    print("// d[64 x kN] (+)= a[64 x 16] * b[16 x kN]; a in registers, b the low word of a\n// swizzled descriptor of shared memory.")
    print("template <class T, int kN>\n__device__ void wgmma(float (&d)[kN / 2], std::uint32_t a0, "
          "std::uint32_t a1, std::uint32_t a2,\n                      std::uint32_t a3, std::uint32_t b, "
          "int accumulate);\n")
    for n in WIDTHS:
        for dtype, tag in (("bf16", "Bf16"), ("f16", "F16")):
            print(function(n, dtype, tag))
    print("}  // namespace qmlp::cuda\n// clang-format on")


if __name__ == "__main__":
    main()
