# Flags that every target of the project shares. Never -march=native: instruction sets are chosen at
# run time, and only the files under src/cpu/kernels are built for one.
add_library(qmlp_flags INTERFACE)
# A fused multiply-add is written where it is meant; the compiler may not make or split one.
target_compile_options(qmlp_flags INTERFACE -ffp-contract=off -fno-math-errno -Wall -Wextra
                                            -Wshadow -Wnon-virtual-dtor)
# GCC 12 sees an overlapping copy in every `"text" + std::string` (its bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(qmlp_flags INTERFACE -Wno-restrict)
endif()
# Some files switch off a warning of GCC's by name.
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(qmlp_flags INTERFACE -Wno-unknown-warning-option)
endif()
if(QMLP_DEVELOPER)
  target_compile_options(qmlp_flags INTERFACE -Werror)
endif()
if(QMLP_SANITIZE)
  # The library has no RTTI, which the vptr check would need.
  target_compile_options(qmlp_flags INTERFACE -fsanitize=${QMLP_SANITIZE} -fno-sanitize=vptr
                                              -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(qmlp_flags INTERFACE -fsanitize=${QMLP_SANITIZE})
endif()
