# Finds the 8-bit PCRE2 library and defines PCRE2::pcre2-8. Used by the build and, installed beside
# qmlpConfig.cmake, by projects that link the static library.
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_PCRE2 QUIET libpcre2-8)
endif()
find_path(PCRE2_INCLUDE_DIR pcre2.h HINTS ${PC_PCRE2_INCLUDE_DIRS})
if(QMLP_STATIC_PCRE2)
  find_library(PCRE2_LIBRARY NAMES libpcre2-8.a HINTS ${PC_PCRE2_LIBRARY_DIRS})
endif()
find_library(PCRE2_LIBRARY NAMES pcre2-8 pcre2-8-static HINTS ${PC_PCRE2_LIBRARY_DIRS})
mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PCRE2 REQUIRED_VARS PCRE2_LIBRARY PCRE2_INCLUDE_DIR
                                        VERSION_VAR PC_PCRE2_VERSION
                                        REASON_FAILURE_MESSAGE "install libpcre2-dev (Debian)")
if(PCRE2_FOUND AND NOT TARGET PCRE2::pcre2-8)
  add_library(PCRE2::pcre2-8 UNKNOWN IMPORTED)
  set_target_properties(PCRE2::pcre2-8 PROPERTIES IMPORTED_LOCATION "${PCRE2_LIBRARY}"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${PCRE2_INCLUDE_DIR}")
endif()
