# qmlp_isa_sources(TARGET ISA FILES...) adds files that are built for one instruction set: portable, avx2 or
# avx512. What such a file defines may not be merged with another's by the linker:
# tools/check_weak_symbols.sh fails on any weak symbol in these objects.
set(QMLP_ISA_FLAGS_portable "")
set(QMLP_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mno-avx512f)
set(QMLP_ISA_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
                          -mprefer-vector-width=512)

function(qmlp_isa_sources target isa)
  if(NOT isa STREQUAL "portable" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  # Vectors wider than the baseline's registers never cross a file's border.
  set(flags ${QMLP_ISA_FLAGS_${isa}} -Wno-psabi)
  if(isa STREQUAL "avx512" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 takes its own undefined vectors in the intrinsics for uninitialized variables.
    list(APPEND flags -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  if(QMLP_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # Unrolled code with a check inlined at each access takes minutes to compile; calls do as well.
    list(APPEND flags -fno-sanitize=undefined -mllvm -asan-instrumentation-with-call-threshold=0)
  endif()
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${flags}")
endfunction()
